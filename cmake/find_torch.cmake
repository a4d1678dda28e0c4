# find_torch.cmake — the torch that the runtime is built against: that of the environment the package goes into, never one that
# is fetched for the build. pip builds in an environment of its own, which has no torch, with the interpreter of the one that is
# installed into: without the variables that pip sets (-E) this interpreter sees its own packages. Other installers run another
# interpreter; for these, the active environment.
#
# Sets torch_root (its folder), torch_abi (0 or 1), torch_includes, torch_version. INTERLACE_TORCH_PYTHON names an interpreter.
set(program "import os, sys, torch, torch.utils.cpp_extension as c
assert list(sys.version_info[:2]) == [${Python3_VERSION_MAJOR}, ${Python3_VERSION_MINOR}], sys.version
print('|'.join([os.path.dirname(torch.__file__), str(int(torch._C._GLIBCXX_USE_CXX11_ABI)), ';'.join(c.include_paths()), torch.__version__]))")
set(torch_facts "")
set(tried "")
foreach(python "${INTERLACE_TORCH_PYTHON}" "${Python3_EXECUTABLE}" "$ENV{VIRTUAL_ENV}/bin/python" "$ENV{CONDA_PREFIX}/bin/python")
  if(torch_facts OR NOT EXISTS "${python}")
    continue()
  endif()
  foreach(option "-W ignore" "-E")
    separate_arguments(option)
    execute_process(COMMAND ${python} ${option} -c "${program}" OUTPUT_VARIABLE found ERROR_VARIABLE trouble RESULT_VARIABLE failed
                    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
    if(NOT failed AND NOT torch_facts)
      string(REGEX MATCH "[^\n]*$" torch_facts "${found}")
    endif()
  endforeach()
  string(REGEX MATCH "[^\n]*$" trouble "${trouble}")
  string(APPEND tried "\n    ${python}: ${trouble}")
endforeach()
if(NOT torch_facts)
  message(FATAL_ERROR "no torch in the environment that Interlace is installed into. Install it first, then Interlace:\n"
    "    pip install torch\n    pip install .\n"
    "Without torch there is the part that plans, simulates and reports:\n    INTERLACE_TORCH=OFF pip install .\n"
    "Looked for with:${tried}")
endif()
string(REGEX REPLACE "^([^|]*)[|].*" "\\1" torch_root "${torch_facts}")
string(REGEX REPLACE "^[^|]*[|]([^|]*)[|].*" "\\1" torch_abi "${torch_facts}")
string(REGEX REPLACE "^[^|]*[|][^|]*[|]([^|]*)[|].*" "\\1" torch_includes "${torch_facts}")
string(REGEX REPLACE ".*[|]" "" torch_version "${torch_facts}")
if(torch_version VERSION_LESS 2.9)  # python/interlace/errors.py: OLDEST_TORCH
  message(FATAL_ERROR "torch ${torch_version} in ${torch_root} is too old: Interlace needs 2.9 or later.\n"
    "    pip install -U torch\n    pip install .\n"
    "Without torch there is the part that plans, simulates and reports:\n    INTERLACE_TORCH=OFF pip install .")
endif()
message(STATUS "torch ${torch_version} in ${torch_root}")
