// Contents of a file, and a call of its function main: run MODEL.so CALLS RESULTS [INPUT...]
//
// Each INPUT is a file with the elements of an input, whose extents the file knows. The model's devices are those of
// its file; with two devices each input is put on its own. The elements of the last call's results are written to the
// file RESULTS. With CALLS > 0 this makes that many further calls, and prints the median time of one; with results on a
// GPU, of a call and of reading them.
#include <algorithm>
#include <chrono>
#include <iostream>
#include <relax_hetero.hpp>

#include "files.hpp"

namespace rh = relax_hetero;

int main(int argc, char** argv) try {
  if (argc < 4) throw std::runtime_error("expected: run MODEL.so CALLS RESULTS [INPUT...]");
  rh::Model model(argv[1]);
  for (int32_t i = 0; i < model.info().num_devices; ++i)
    std::cout << "device " << model.info().devices[i].name << "\n";
  for (int32_t i = 0; i < model.info().num_functions; ++i) {
    const rh_function_info& function = model.info().functions[i];
    std::cout << "function " << function.name << "\n";
    for (int32_t k = 0; k < function.num_inputs; ++k)
      std::cout << "  takes " << function.inputs[k].name << ": " << function.inputs[k].type << "\n";
    for (int32_t k = 0; k < function.num_outputs; ++k)
      std::cout << "  returns " << function.outputs[k].name << ": " << function.outputs[k].type << "\n";
  }

  rh::Function function = model["main"];
  std::vector<rh::Tensor> inputs;
  for (int32_t i = 0; i < std::min(argc - 4, function.info().num_inputs); ++i) {
    const rh_value_info& input = function.info().inputs[i];
    std::vector<char> bytes = read_file<char>(argv[4 + i]);
    if (input.kind != RH_TENSOR || input.shape == nullptr || std::count(input.shape, input.shape + input.ndim, -1) > 0)
      throw std::runtime_error(std::string(input.name) + " is " + input.type + ", expected a tensor of known extents");
    auto tensor = rh::Tensor::empty(input.dtype, {input.shape, input.shape + input.ndim}, function.input_device(i));
    if (rh_tensor_write(tensor.get(), bytes.data(), bytes.size()) != 0)
      throw std::runtime_error(std::string(argv[4 + i]) + ": " + rh_error());
    inputs.push_back(tensor);
  }
  std::vector<rh::Tensor> results;
  std::vector<std::vector<char>> elements;
  auto read_results = [&](bool is_last) {
    elements.resize(results.size());
    for (size_t i = 0; i < results.size(); ++i) {
      if (!is_last && results[i].device().device_type == kDLCPU) continue;
      elements[i].resize(results[i].bytes());
      if (rh_tensor_read(results[i].get(), elements[i].data(), elements[i].size()) != 0)
        throw std::runtime_error(rh_error());
    }
  };
  results = function.run(inputs);
  std::vector<double> times;
  for (int i = 0; i < std::stoi(argv[2]); ++i) {
    auto begin = std::chrono::steady_clock::now();
    results = function.run(inputs);
    read_results(false);
    times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
  }
  read_results(true);
  std::ofstream file(argv[3], std::ios::binary);
  for (const std::vector<char>& bytes : elements) append_to(file, bytes);
  if (!times.empty()) {
    std::sort(times.begin(), times.end());
    std::cout << times[times.size() / 2] << " us per call\n";
  }
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 1;
}
