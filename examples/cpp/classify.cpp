// The five most likely classes of a picture: classify MODEL.so PICTURE.ppm [SCORES]
//
// The model takes one float32[1, 3, height, width] and returns a score for each class first. The scores are also
// written to the file SCORES, as float32.
#include <algorithm>
#include <iostream>
#include <numeric>
#include <relax_hetero.hpp>

#include "files.hpp"

// The picture at the model's size (nearest pixels), normalized as for networks trained on ImageNet.
std::vector<float> pixels(const Picture& picture, int64_t height, int64_t width) {
  const float mean[] = {0.485f, 0.456f, 0.406f}, deviation[] = {0.229f, 0.224f, 0.225f};
  std::vector<float> values;
  for (int64_t channel = 0; channel < 3; ++channel)
    for (int64_t y = 0; y < height; ++y)
      for (int64_t x = 0; x < width; ++x) {
        int64_t row = y * picture.height / height, column = x * picture.width / width;
        float value = picture.rgb[static_cast<size_t>((row * picture.width + column) * 3 + channel)] / 255.0f;
        values.push_back((value - mean[channel]) / deviation[channel]);
      }
  return values;
}

int main(int argc, char** argv) try {
  if (argc < 3) throw std::runtime_error("expected: classify MODEL.so PICTURE.ppm [SCORES]");
  relax_hetero::Model model(argv[1]);
  relax_hetero::Function network = model["main"];
  const rh_value_info& input = network.info().inputs[0];
  if (network.info().num_inputs != 1 || input.ndim != 4 || input.shape[1] != 3 || input.shape[2] < 1)
    throw std::runtime_error(std::string("the model takes ") + input.type + ", expected float32[1, 3, height, width]");
  std::vector<float> values = pixels(read_ppm(argv[2]), input.shape[2], input.shape[3]);
  std::vector<int64_t> shape = {1, 3, input.shape[2], input.shape[3]};
  auto image = relax_hetero::Tensor::of<float>(shape, values, network.input_device(0));

  std::vector<float> scores = network(image).at(0).read<float>();
  std::vector<size_t> classes(scores.size());
  std::iota(classes.begin(), classes.end(), 0);
  size_t count = std::min<size_t>(5, classes.size());
  std::partial_sort(classes.begin(), classes.begin() + static_cast<std::ptrdiff_t>(count), classes.end(),
                    [&](size_t a, size_t b) { return scores[a] > scores[b]; });
  for (size_t i = 0; i < count; ++i) std::cout << "class " << classes[i] << ": " << scores[classes[i]] << "\n";
  if (argc > 3) {
    std::ofstream file(argv[3], std::ios::binary);
    append_to(file, scores);
  }
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 1;
}
