# What interlace-opt says and how it exits. Run by ctest:
#   cmake -DOPT=<program> -DSOURCE=<repository> -DWORK=<empty folder> -P test.cmake
set(MLP ${SOURCE}/tests/golden/passes/mlp.il)
file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
set(failures 0)

# expect(NAME CODE TEXT args...): the exit code, and TEXT (a regular expression, or empty) somewhere in what is printed.
function(expect name code text)
  execute_process(COMMAND ${OPT} ${ARGN} WORKING_DIRECTORY ${WORK}
                  RESULT_VARIABLE actual OUTPUT_VARIABLE out ERROR_VARIABLE err)
  if(NOT actual EQUAL code)
    message(SEND_ERROR "${name}: exit code ${actual}, expected ${code}\n${out}${err}")
  elseif(text AND NOT "${out}${err}" MATCHES "${text}")
    message(SEND_ERROR "${name}: expected '${text}' in\n${out}${err}")
  endif()
  set(out "${out}" PARENT_SCOPE)
endfunction()

expect(help 0 "Examples:" --help)
expect(list 0 "shard\n    ZeRO-3" --list-passes)
expect(nothing 2 "give a program file")
expect(option 2 "unknown option --pases, did you mean '--passes'" --pases=x ${MLP})
expect(value 2 "-o needs a value" ${MLP} -o)
expect(two 2 "one program at a time" ${MLP} ${MLP})
expect(pass 2 "unknown pass 'shrad', did you mean 'shard'" --passes=shrad ${MLP})
expect(bind 2 "expected NAME=NUMBER, found 'b'" --bind b ${MLP})
expect(symbol 1 "interlace-opt: .*b" --bind b=4 ${MLP})
expect(missing 1 "cannot read nothing.il: No such file" nothing.il)
expect(write 1 "cannot write nowhere/x.il" -o nowhere/x.il ${MLP})
expect(summary 0 "received .* by gathers" --passes=shard\(ranks=2\) --print-summary ${MLP})
expect(timing 0 "shard.ranks=2.: .* ms, changed" --passes shard\(ranks=2\) --timing ${MLP})
expect(order 1 "pass 'update': the program has no units" --passes=update ${MLP} --repro repro.il)
expect(repro 1 "pass 'update': the program has no units" --verify --passes=update repro.il)

# Text through files and pipes is the same text.
expect(file 0 "" --verify --passes=canonicalize,shard\(ranks=2\),update\(clip=1.0\) --dump-ir dump ${MLP} -o out.il)
file(READ ${WORK}/out.il written)
file(READ ${SOURCE}/tests/golden/passes/mlp.shard2.il golden)
file(READ ${WORK}/dump/03-update.il dumped)
if(NOT written STREQUAL golden OR NOT dumped STREQUAL golden)
  message(SEND_ERROR "file: not the golden text")
endif()
execute_process(COMMAND ${OPT} - INPUT_FILE ${WORK}/out.il OUTPUT_VARIABLE piped RESULT_VARIABLE code)
if(NOT code EQUAL 0 OR NOT piped STREQUAL golden)
  message(SEND_ERROR "pipe: not the same text (${code})")
endif()
file(SHA256 ${WORK}/out.il sha)
expect(digest 0 "^${sha}\n$" --digest out.il)

# A file that is cut is refused with its place.
string(SUBSTRING "${golden}" 0 1500 cut)
file(WRITE ${WORK}/cut.il "${cut}")
expect(cut 1 "cut.il:[0-9]+:[0-9]+: " cut.il)
