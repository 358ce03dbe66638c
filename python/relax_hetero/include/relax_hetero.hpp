// relax_hetero: models that `Executable.export_library` has written, in C++17 and without Python.
//
//     relax_hetero::Model model("model.so");
//     auto x = relax_hetero::Tensor::of<float>({1, 10}, values);
//     std::vector<float> y = model["main"](x).at(0).read<float>();
//
// Objects own what relax_hetero.h makes, and errors are exceptions. See that file for threads and devices.
#ifndef RELAX_HETERO_HPP_
#define RELAX_HETERO_HPP_

#include <relax_hetero.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace relax_hetero {

/// Any failure; the message says where, what was found and what was expected.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The element type of TVM for a type of C++.
template <typename T>
constexpr DLDataType dtype_of() {
  static_assert(std::is_arithmetic_v<T> && !std::is_same_v<T, long double>,
                "expected a number of TVM; other element types are given as DLDataType");
  constexpr DLDataTypeCode integer = std::is_signed_v<T> ? kDLInt : kDLUInt;
  constexpr DLDataTypeCode number = std::is_floating_point_v<T> ? kDLFloat : integer;
  constexpr DLDataTypeCode code = std::is_same_v<T, bool> ? kDLBool : number;
  return DLDataType{static_cast<uint8_t>(code), 8 * sizeof(T), 1};
}

inline constexpr DLDevice kCpu{kDLCPU, 0};

/// A reference to a tensor, contiguous on one device.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(rh_tensor* owned) : tensor_(owned, rh_tensor_free) {}

  /// A tensor with undefined elements.
  static Tensor empty(DLDataType dtype, const std::vector<int64_t>& shape, DLDevice device = kCpu) {
    rh_tensor* tensor = rh_tensor_new(dtype, static_cast<int32_t>(shape.size()), shape.data(), device);
    if (tensor == nullptr) throw Error(rh_error());
    return Tensor(tensor);
  }

  /// A tensor with a copy of `values`.
  template <typename T>
  static Tensor of(const std::vector<int64_t>& shape, const std::vector<T>& values, DLDevice device = kCpu) {
    static_assert(!std::is_same_v<T, bool>,
                  "std::vector<bool> has no elements in memory; use empty() and data<bool>()");
    Tensor tensor = empty(dtype_of<T>(), shape, device);
    if (rh_tensor_write(tensor.get(), values.data(), values.size() * sizeof(T)) != 0) throw Error(rh_error());
    return tensor;
  }

  rh_tensor* get() const { return tensor_.get(); }
  const DLTensor& dl() const { return *rh_tensor_dl(tensor_.get()); }
  DLDevice device() const { return dl().device; }
  DLDataType dtype() const { return dl().dtype; }
  std::vector<int64_t> shape() const { return {dl().shape, dl().shape + dl().ndim}; }
  size_t bytes() const { return rh_tensor_bytes(tensor_.get()); }

  /// The elements of a tensor of a CPU.
  template <typename T>
  T* data() const {
    check<T>();
    if (device().device_type != kDLCPU) throw Error("data(): the tensor is not on a CPU; use read()");
    return static_cast<T*>(rh_tensor_data(tensor_.get()));
  }

  /// A copy of the elements.
  template <typename T>
  std::vector<T> read() const {
    static_assert(!std::is_same_v<T, bool>, "std::vector<bool> has no elements in memory; use data<bool>()");
    check<T>();
    std::vector<T> values(bytes() / sizeof(T));
    if (rh_tensor_read(tensor_.get(), values.data(), bytes()) != 0) throw Error(rh_error());
    return values;
  }

 private:
  template <typename T>
  void check() const {
    DLDataType wanted = dtype_of<T>();
    if (dtype().code != wanted.code || dtype().bits != wanted.bits || dtype().lanes != 1)
      throw Error("a tensor of type code " + std::to_string(dtype().code) + " with " + std::to_string(dtype().bits) +
                  " bits, expected type code " + std::to_string(wanted.code) + " with " +
                  std::to_string(wanted.bits) + " bits");
  }

  std::shared_ptr<rh_tensor> tensor_;
};

class Model;

/// A function of a model, which it keeps alive.
class Function {
 public:
  const rh_function_info& info() const { return *info_; }

  /// Call with the inputs in order; an empty `Tensor` stands for a default value. Returns the fields of a tuple, or one
  /// tensor.
  std::vector<Tensor> run(const std::vector<Tensor>& inputs) const {
    std::vector<rh_tensor*> args(inputs.size()), results(static_cast<size_t>(info_->num_outputs));
    for (size_t i = 0; i < inputs.size(); ++i) args[i] = inputs[i].get();
    int32_t count = rh_run(model_.get(), info_, args.data(), static_cast<int32_t>(args.size()), results.data(),
                           info_->num_outputs);
    if (count < 0) throw Error(rh_error());
    std::vector<Tensor> outputs;
    for (int32_t i = 0; i < count; ++i) outputs.emplace_back(results[static_cast<size_t>(i)]);
    return outputs;
  }

  template <typename... Inputs>
  std::vector<Tensor> operator()(const Inputs&... inputs) const {
    return run({inputs...});
  }

  /// The device of input `index`.
  DLDevice input_device(int32_t index) const { return rh_device_of(model_.get(), &info_->inputs[index]); }

 private:
  friend class Model;
  Function(std::shared_ptr<rh_model> model, const rh_function_info* info) : model_(std::move(model)), info_(info) {}

  std::shared_ptr<rh_model> model_;
  const rh_function_info* info_;
};

/// A loaded file with a machine, for one thread at a time.
class Model {
 public:
  /// Load a file, on its own devices, or on one of the same type for each of them. Loading a file runs its code.
  explicit Model(const std::string& path, const std::vector<DLDevice>& devices = {})
      : model_(rh_load(path.c_str(), devices.data(), static_cast<int32_t>(devices.size())), rh_free) {
    if (model_ == nullptr) throw Error(rh_error());
  }

  const rh_file_info& info() const { return *model_->info; }

  Function operator[](const std::string& name) const {
    const rh_function_info* info = rh_find(model_.get(), name.c_str());
    if (info == nullptr) throw Error(rh_error());
    return Function(model_, info);
  }

 private:
  std::shared_ptr<rh_model> model_;
};

}  // namespace relax_hetero

#endif
