#include "passes/pipeline.h"

#include <gtest/gtest.h>

#include "base/digest.h"
#include "passes/pass_table.h"

namespace interlace {
namespace {

std::string Message(const std::string& text) {
  Result<std::vector<PassCall>> calls = ParsePipeline(text);
  return calls.ok() ? "ok: " + PrintPipeline(*calls) : calls.error().message;
}

TEST(Pipeline, PrintsWhatItParsed) {
  EXPECT_EQ(Message(""), "ok: ");
  EXPECT_EQ(Message("canonicalize"), "ok: canonicalize");
  EXPECT_EQ(Message(" canonicalize ( ) , shard( ranks = 2 , axis=tp ),update(clip=1e-2)"),
            "ok: canonicalize,shard(ranks=2,axis=tp),update(clip=1e-2)");
  EXPECT_EQ(Message("update(clip=none)"), "ok: update(clip=none)");
}

TEST(Pipeline, ErrorsSayWhatToWrite) {
  EXPECT_EQ(Message("shrad(ranks=2)"), "unknown pass 'shrad', did you mean 'shard'?");
  EXPECT_EQ(Message("frobnicate"), "unknown pass 'frobnicate'; interlace-opt --list-passes shows all");
  EXPECT_EQ(Message("shard(rank=2)"),
            "pass 'shard': unknown option 'rank', did you mean 'ranks'? (options: axis, ranks, replicas, wait, ahead, "
            "states)");
  EXPECT_EQ(Message("canonicalize(fast=true)"), "pass 'canonicalize': unknown option 'fast' (options: none)");
  EXPECT_EQ(Message("accumulate"),
            "pass 'accumulate': option 'steps' is required (micro-batches of a step), for example accumulate(steps=2)");
  EXPECT_EQ(Message("shard(ranks=0)"), "pass 'shard': option ranks=0: must be at least 1");
  EXPECT_EQ(Message("shard(ranks=two)"), "pass 'shard': option ranks=two: expected a whole number");
  EXPECT_EQ(Message("shard(ranks=2,ranks=3)"), "pass 'shard': option 'ranks' is given twice");
  EXPECT_EQ(Message("shard(ranks=2,axis=d.p)"),
            "pass 'shard': option axis=d.p: expected a name of letters, digits and _");
  EXPECT_EQ(Message("zero1(ranks=2,wait=nxt)"),
            "pass 'zero1': option wait=nxt: expected next or now, did you mean 'next'?");
  EXPECT_EQ(Message("update(clip=-1)"), "pass 'update': option clip=-1: expected a positive number or none");
  EXPECT_EQ(Message("update(clip=nan)"), "pass 'update': option clip=nan: expected a positive number or none");
  EXPECT_EQ(Message("shard(ranks=99999999999999999999)"),
            "pass 'shard': option ranks=99999999999999999999: expected a whole number");
  EXPECT_EQ(Message("shard(ranks)"),
            "pass 'shard': pipeline 'shard(ranks)', column 12: expected '=' after option 'ranks', found ')'");
  EXPECT_EQ(Message("shard(ranks=2"),
            "pass 'shard': pipeline 'shard(ranks=2', column 14: expected ',' or ')', found the end");
  EXPECT_EQ(Message("canonicalize,"),
            "pipeline 'canonicalize,', column 14: expected the name of a pass, found the end");
  EXPECT_EQ(Message("canonicalize shard"),
            "pipeline 'canonicalize shard', column 14: expected ',' between passes, found 's'");
}

TEST(PassTable, EveryPassHasHelpAndItsOptionsAreListed) {
  std::string text = PassTableText();
  for (const PassInfo& pass : PassTable()) {
    EXPECT_EQ(FindPass(pass.name), &pass);
    EXPECT_FALSE(pass.help.empty()) << pass.name;
    EXPECT_NE(text.find(std::string(pass.name) + "\n"), std::string::npos);
    for (const OptionInfo& option : pass.options) {
      EXPECT_FALSE(option.help.empty()) << pass.name << " " << option.name;
      EXPECT_NE(text.find("    " + std::string(option.name) + "="), std::string::npos) << pass.name;
      // The default of a choice is its first word, as PassOptions::Choice takes it.
      if (option.kind == OptionKind::kChoice) {
        ASSERT_FALSE(option.choices.empty());
        EXPECT_EQ(option.choices[0], option.missing);
      }
    }
  }
  EXPECT_EQ(FindPass("nothing"), nullptr);
}

TEST(Digest, IsSha256) {  // test vectors of FIPS 180-4, and the lengths at which the padding needs a second block
  EXPECT_EQ(Digest(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Digest("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Digest("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(Digest(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  EXPECT_EQ(Digest(std::string(55, 'a')), "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
  EXPECT_EQ(Digest(std::string(64, 'a')), "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");
}

}  // namespace
}  // namespace interlace
