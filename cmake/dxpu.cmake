# dxpu_library(name SOURCES … DEPS …): a room or a part of one, as a static library dxpu_<name>.
function(dxpu_library name)
  cmake_parse_arguments(arg "" "" "SOURCES;DEPS" ${ARGN})
  add_library(dxpu_${name} STATIC ${arg_SOURCES})
  target_include_directories(dxpu_${name} PUBLIC ${CMAKE_SOURCE_DIR})
  target_link_libraries(dxpu_${name} PUBLIC ${arg_DEPS} Threads::Threads)
endfunction()

# dxpu_program(name SOURCES … DEPS …): an executable bin/<name>.
function(dxpu_program name)
  cmake_parse_arguments(arg "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${arg_DEPS} Threads::Threads)
endfunction()

# dxpu_test(name LABEL room SOURCES … DEPS …): a GoogleTest program, one ctest entry, killed after TIMEOUT (default 120) s.
function(dxpu_test name)
  cmake_parse_arguments(arg "" "LABEL;TIMEOUT" "SOURCES;DEPS" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${arg_DEPS} GTest::gmock GTest::gtest_main Threads::Threads)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${arg_TIMEOUT} LABELS "${arg_LABEL}")
endfunction()

# dxpu_fuzz(name SOURCES … DEPS …): a libFuzzer program bin/fuzz_<name>; only with DXPU_FUZZ (clang). The rooms it links must be
# built with -fsanitize=fuzzer-no-link as well, which the fuzz preset does.
function(dxpu_fuzz name)
  if(NOT DXPU_FUZZ)
    return()
  endif()
  cmake_parse_arguments(arg "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(fuzz_${name} ${arg_SOURCES})
  target_include_directories(fuzz_${name} PRIVATE ${CMAKE_SOURCE_DIR})
  target_link_libraries(fuzz_${name} PRIVATE ${arg_DEPS} Threads::Threads)
  target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
endfunction()
