// Files of the examples: raw numbers, and pictures in PPM.
#pragma once

#include <cstdint>
#include <fstream>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

template <typename T>
std::vector<T> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) throw std::runtime_error(path + ": cannot be read");
  std::vector<T> values(static_cast<size_t>(file.tellg()) / sizeof(T));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(T)));
  return values;
}

template <typename T>
void append_to(std::ofstream& file, const std::vector<T>& values) {
  file.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(T)));
}

struct Picture {
  int64_t width = 0, height = 0;
  std::vector<uint8_t> rgb;  // [height, width, 3]
};

// A picture in PPM ("P6", 8 bits), which `convert photo.jpg photo.ppm` writes.
inline Picture read_ppm(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string magic;
  int64_t numbers[3] = {0, 0, 0};
  file >> magic;
  for (int64_t& number : numbers) {
    while (file >> std::ws && file.peek() == '#') file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
    file >> number;
  }
  file.get();
  Picture picture{numbers[0], numbers[1], {}};
  if (!file || magic != "P6" || numbers[2] != 255 || picture.width < 1 || picture.height < 1)
    throw std::runtime_error(path + ": not a picture in PPM (P6) with 8 bits");
  picture.rgb.resize(static_cast<size_t>(picture.width * picture.height * 3));
  if (!file.read(reinterpret_cast<char*>(picture.rgb.data()), static_cast<std::streamsize>(picture.rgb.size())))
    throw std::runtime_error(path + ": the file is truncated");
  return picture;
}
