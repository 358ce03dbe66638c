// Sentences by similarity to the first one: similarity MODEL.so TOKENS [EMBEDDINGS]
//
// C++ has no tokenizer of the model: export.py writes TOKENS, int64 numbers: the number of sentences and of tokens,
// then input_ids and attention_mask. The model's devices are those of its file, one or several. The embeddings are also
// written to the file EMBEDDINGS, as float32.
#include <algorithm>
#include <iostream>
#include <numeric>
#include <relax_hetero.hpp>

#include "files.hpp"

int main(int argc, char** argv) try {
  if (argc < 3) throw std::runtime_error("expected: similarity MODEL.so TOKENS [EMBEDDINGS]");
  std::vector<int64_t> numbers = read_file<int64_t>(argv[2]);
  if (numbers.size() < 2 || numbers.size() != static_cast<size_t>(2 + 2 * numbers[0] * numbers[1]))
    throw std::runtime_error(std::string(argv[2]) + ": not a file of tokens that export.py has written");
  std::vector<int64_t> shape(numbers.begin(), numbers.begin() + 2);
  auto ids_end = numbers.begin() + 2 + shape[0] * shape[1];

  relax_hetero::Model model(argv[1]);
  for (int32_t i = 0; i < model.info().num_devices; ++i)
    std::cout << "device " << model.info().devices[i].name << "\n";
  relax_hetero::Function embed = model["main"];
  auto ids = relax_hetero::Tensor::of<int64_t>(shape, {numbers.begin() + 2, ids_end}, embed.input_device(0));
  auto mask = relax_hetero::Tensor::of<int64_t>(shape, {ids_end, numbers.end()}, embed.input_device(1));
  relax_hetero::Tensor result = embed(ids, mask).at(0);

  std::vector<float> embeddings = result.read<float>();  // unit vectors
  int64_t width = result.shape().back();
  std::vector<float> similarity(static_cast<size_t>(shape[0]));
  for (int64_t row = 0; row < shape[0]; ++row)
    similarity[static_cast<size_t>(row)] = std::inner_product(embeddings.begin(), embeddings.begin() + width,
                                                              embeddings.begin() + row * width, 0.0f);
  std::vector<size_t> order(similarity.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin() + 1, order.end(), [&](size_t a, size_t b) { return similarity[a] > similarity[b]; });
  for (size_t i = 1; i < order.size(); ++i)
    std::cout << "sentence " << order[i] << ": " << similarity[order[i]] << "\n";
  if (argc > 3) {
    std::ofstream file(argv[3], std::ios::binary);
    append_to(file, embeddings);
  }
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 1;
}
