# find_package(relax_hetero CONFIG REQUIRED) defines the target relax_hetero::relax_hetero, with the headers
# relax_hetero.h and relax_hetero.hpp, TVM's run time and TVM-FFI. Set relax_hetero_DIR to what
# `relax-hetero config --cmakedir` prints, and Python_EXECUTABLE to the Python that has the package.
if(NOT Python_EXECUTABLE)
  find_package(Python COMPONENTS Interpreter REQUIRED)
endif()

foreach(_what cflags libs)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -m relax_hetero config --${_what}
    OUTPUT_VARIABLE _options RESULT_VARIABLE _status OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT _status EQUAL 0)
    message(FATAL_ERROR "${Python_EXECUTABLE} -m relax_hetero config failed; set Python_EXECUTABLE to the Python "
                        "that has the package relax_hetero")
  endif()
  separate_arguments(_relax_hetero_${_what} UNIX_COMMAND "${_options}")
endforeach()

if(NOT TARGET relax_hetero::relax_hetero)
  add_library(relax_hetero::relax_hetero INTERFACE IMPORTED)
  set_target_properties(relax_hetero::relax_hetero PROPERTIES
    INTERFACE_COMPILE_OPTIONS "${_relax_hetero_cflags}"
    INTERFACE_LINK_LIBRARIES "${_relax_hetero_libs}")
endif()
