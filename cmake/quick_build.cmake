# quick_build.cmake — all that makes a build or a test run faster and changes nothing else: ccache, unity batches, a shared
# precompiled header, flags of the core preset (INTERLACE_QUICK), how the compiler keeps its memory, tests in shards. A room
# added to CMakeLists.txt needs no line here.

find_program(CCACHE ccache)
if(CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE})
  if(INTERLACE_QUICK)  # without this, nothing that uses a precompiled header is cached
    set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${CCACHE})
  endif()
endif()

if(INTERLACE_QUICK)
  # Errors are values here and nothing is caught, so no code has to be made for unwinding.
  add_compile_options(-fno-exceptions -fno-asynchronous-unwind-tables)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # What is called once stays a function: long functions take it more time than their calls would.
    add_compile_options(-fno-inline-functions-called-once)
  endif()
endif()
if((INTERLACE_QUICK OR INTERLACE_TESTING) AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # The compiler's own garbage is collected seldom; a batch stays under 2 GB, which who only installs may not have for every core.
  add_compile_options("SHELL:--param ggc-min-expand=200" "SHELL:--param ggc-min-heapsize=1000000")
endif()

# interlace_batches(target source...): in a unity build, as few batches as CMAKE_UNITY_BUILD_BATCH_SIZE allows, all of about
# one length.
function(interlace_batches target)
  list(LENGTH ARGN count)
  if(CMAKE_UNITY_BUILD)
    math(EXPR batches "(${count} + ${CMAKE_UNITY_BUILD_BATCH_SIZE} - 1) / ${CMAKE_UNITY_BUILD_BATCH_SIZE}")
    math(EXPR size "(${count} + ${batches} - 1) / ${batches}")
    set_target_properties(${target} PROPERTIES UNITY_BUILD_BATCH_SIZE ${size})
  endif()
endfunction()

# interlace_precompile(target): the standard headers and GoogleTest, read once for all libraries and tests. The room base,
# which is made first, holds them; flags must be the same.
set(standard_headers <algorithm> <array> <charconv> <cmath> <deque> <fstream> <functional> <iostream> <limits> <map> <memory>
    <numeric> <optional> <random> <set> <span> <sstream> <string> <unordered_map> <unordered_set> <variant> <vector>)
if(INTERLACE_TESTS)
  list(APPEND standard_headers <gtest/gtest.h>)
  if(INTERLACE_PRECOMPILE)
    link_libraries(GTest::gtest)  # its flags
  endif()
endif()
function(interlace_precompile target)
  if(INTERLACE_PRECOMPILE)
    if(target STREQUAL interlace_base)
      target_precompile_headers(${target} PRIVATE ${standard_headers})
    else()
      target_precompile_headers(${target} REUSE_FROM interlace_base)
    endif()
  endif()
endfunction()

# interlace_test_shards(out room): in how many processes a room's tests run. Shards of long tests take about a second and
# start first, so that both cores have work to the end.
function(interlace_test_shards out room)
  set(shards 1)
  if(room MATCHES "^(passes|plan)$")
    set(shards 5)
  elseif(room STREQUAL "sim")
    set(shards 2)
  endif()
  set(${out} ${shards} PARENT_SCOPE)
endfunction()
