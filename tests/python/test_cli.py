"""The command line: help, exit codes, and the exact messages of wrong input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from interlace.checkpoint.tensor_file import checksum_text, sums_of
from interlace.cli import app

SMALL = """interlace 1 captured
meta model "tiny"
param %0: f32[4] "w" trainable
input %1: f32[4] "x"
phase micro_batch takes () gives () {
  %2: f32[4] = aten.mul.Tensor(%0, %1) {fwd}
  %3: f32[] = aten.sum(%2) {fwd}
  %4: f32[4] = aten.neg(%1) {fwd}
  output(%3) {fwd name="loss"}
}
"""


@pytest.fixture
def cli(capfd, monkeypatch, tmp_path):
    """Runs a command line in this process: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = app.run(list(arguments))
        return code, *capfd.readouterr()

    return call


def error_of(cli, *arguments: str, code: int = 1) -> str:
    got, _, err = cli(*arguments)
    assert "Traceback" not in err
    assert got == code, err
    _, found, said = f"\n{err}".partition("\nerror: ")  # behind what long work says on a slow machine
    assert found and err.endswith("\n"), err
    return said.rstrip("\n")


@pytest.fixture
def program(tmp_path) -> Path:
    file = tmp_path / "small.il"
    file.write_text(SMALL)
    return file


# ---- the command itself ----


@pytest.mark.parametrize("command", ["train", "capture", "opt", "inspect", "plan"])
def test_help_has_an_example(cli, command):
    code, out, _ = cli(command, "--help")
    assert code == 0 and "Examples" in out and f"interlace {command} " in out


def test_no_command_shows_the_help(cli):
    code, out, _ = cli()
    assert code == 0 and all(command in out for command in ("train", "capture", "opt", "inspect"))


def test_version(cli):
    code, out, _ = cli("--version")
    assert code == 0 and out.startswith("interlace ")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["trian"], "no such command 'trian'; did you mean 'train'?\n  see: interlace --help"),
        (["train", "--step", "4"], "no such option: --step; did you mean '--steps'?\n  see: interlace train --help"),
        (["train", "more"], "got unexpected extra argument(s) (more)\n  see: interlace train --help"),
        (["inspect"], "missing argument 'file'\n  see: interlace inspect --help"),
        (["checkpoint"], "missing argument 'action'. Choose from: show, verify, export, import\n  see: interlace checkpoint --help"),
    ],
)
def test_wrong_command_line(cli, arguments, said):
    assert error_of(cli, *arguments, code=2) == said


def test_wrong_number(cli):
    assert error_of(cli, "train", "--seq", "many", code=2).startswith("invalid value for '--seq': ")


def test_debug_shows_the_traceback(cli):
    code, _, err = cli("inspect", "absent.il", "--debug")
    assert code == 1 and "Traceback" in err and err.endswith("error: no such file: absent.il\n")


# ---- train: settings ----


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--ranks", "0"], "--ranks must be at least 1, not 0"),
        (["--log-every", "0"], "--log-every must be at least 1, not 0"),
        (["--warmup", "-1"], "--warmup must not be negative, not -1"),
        (["--lr", "0"], "--lr must be a positive number, not 0.0"),
        (["--lr", "nan"], "--lr must be a positive number, not nan"),
        (["--clip", "much"], "--clip 'much' is neither a number nor none"),
        (["--clip", "-1"], "--clip must be a positive number, not -1.0"),
        (["--strategy", "zero"], "--strategy 'zero' is not one of auto, shard, replicate, zero1; did you mean 'zero1'?"),
        (["--tokenizer", "bpee"], "--tokenizer 'bpee' is not one of byte, bpe; did you mean 'bpe'?"),
        (["--dtype", "fp8"], "--dtype 'fp8' is not one of float32, bfloat16, float64"),
        (["--dtype", "bfloat"], "--dtype 'bfloat' is not one of float32, bfloat16, float64; did you mean 'bfloat16'?"),
        (["--batch", "7"], "--batch 7 is not a multiple of 2 ranks: use 6 or 8"),
        (
            ["--batch", "4", "--ranks", "4", "--accumulation", "2"],
            "--batch 4 is not a multiple of 4 ranks x 2 micro-batches: use 8",
        ),
        (["--resume", "absent"], "--resume absent: no saved run there (no run.json)"),
    ],
)
def test_train_settings(cli, arguments, said):
    assert error_of(cli, "train", *arguments) == said


@pytest.mark.parametrize("option", ["--log", "--program", "--trace", "--trace-snapshot"])
def test_train_files_that_cannot_be_written_are_told_before_the_work(cli, tmp_path, option):
    assert error_of(cli, "train", option, "none/x").endswith("none/x: there is no folder none")
    assert error_of(cli, "train", option, ".").endswith(".: it is a folder")
    (tmp_path / "file").write_text("")
    assert error_of(cli, "train", option, "file/x").startswith("cannot write ")


def test_train_a_folder_of_traces_that_cannot_be_written(cli, tmp_path):
    (tmp_path / "file").write_text("")
    assert error_of(cli, "train", "--trace-chakra", "file") == "cannot write traces to file: it is a file, not a folder"
    assert error_of(cli, "train", "--trace-chakra", "file/x") == "cannot write traces to file/x: Not a directory"
    assert error_of(cli, "train", "--trace", "/dev/full") == "cannot write the trace /dev/full: it is no file"


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "no output file: name one with -o FILE (examples: interlace capture --help)"),
        (["-o", "none/x.il"], "cannot write none/x.il: there is no folder none"),
        (["-o", "."], "cannot write .: it is a folder"),
        (["-o", "x.il", "--micro-batch", "99999999999999999999"], "an example batch of 99999999999999999999 rows, 256 long"),
        (["-o", "x.il", "--seq", "4611686018427387904", "--micro-batch", "4"], "an example batch of 4 rows, 4611686018427387904"),
    ],
)  # fmt: skip
def test_capture_wrong_input(cli, tmp_path, arguments, said):
    assert error_of(cli, "capture", *arguments).startswith(said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    ["capture --model gpt-22 -o x.il", "plan gpt-22 --cluster local-2 --global-batch 8 --seq 64"],
)
def test_unknown_models_are_said_before_torch_and_transformers_are_imported(words):
    script = (
        "import sys; from interlace.cli.app import run\n"
        f"code = run({words.split()}); sys.exit(code != 1 or 'torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and "unknown model 'gpt-22'" in done.stderr and "did you mean gpt" in done.stderr


@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": -64}, {"hidden_size": 10**30}, {"num_attention_heads": 0}, {"num_hidden_layers": "two"}, {"vocab_size": None}],
    ids=str,
)  # fmt: skip
def test_capture_of_a_config_that_cannot_be(cli, tmp_path, changes):
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 64} | changes))
    assert error_of(cli, "capture", "--model", "config.json", "-o", "x.il").startswith(
        "model 'config.json' cannot be built from its config ("
    )


def test_train_unknown_model(cli):
    said = error_of(cli, "train", "--model", "llama-10n")
    assert said.startswith("unknown model 'llama-10n'") and "did you mean llama-10m" in said


def test_train_model_that_reads_no_text(cli):
    said = error_of(cli, "train", "--model", "vit-tiny")
    assert said.startswith("'vit-tiny' is no language model and cannot be trained on text: use one of llama-tiny, ")


def saved_run(folder: Path, record: str) -> None:
    """A checkpoint folder with sound checksums and this run.json."""
    folder.mkdir(exist_ok=True)
    files = {"trainer.json": '{"format": 2, "step": 50, "groups": [], "kind": []}', "run.json": record}
    for name, text in files.items():
        (folder / name).write_text(text)
    sums = {name: {"bytes": len(text), "ranges": sums_of(text.encode())} for name, text in files.items()}
    body = json.dumps({"format": 2, "checksum": "xxh64", "files": sums}, separators=(",", ":"))
    (folder / "checksums.json").write_text(body[:-1] + f',"self":"{checksum_text(body.encode())}"}}\n')


def test_train_resume_of_a_damaged_or_newer_run(cli, tmp_path):
    run = tmp_path / "run"
    saved_run(run, '{"format": 1, "step"')
    assert error_of(cli, "train", "--resume", "run").startswith("run/run.json is cut off or was edited (")
    newer = {"format": 9, "step": 1, "rows": 0, "tokens": 0, "data_digest": "", "settings": {}}
    saved_run(run, json.dumps(newer))
    assert error_of(cli, "train", "--resume", "run").startswith(
        "run/run.json was written by a newer version (format 9,"
    )
    saved_run(run, json.dumps(newer | {"format": 2, "step": 50, "settings": {"steps": 50}}))
    assert error_of(cli, "train", "--resume", "run") == (
        "the run in run has made 50 of 50 steps: give more with --steps"
    )
    (run / "run.json").write_text(json.dumps(newer))
    assert "run.json" in error_of(cli, "train", "--resume", "run")


# ---- train: text ----


@pytest.mark.parametrize(
    "data, said",
    [
        (None, "no such file or folder: text.txt"),
        (b"", "text.txt is empty: give a file with text in it"),
        (b"ab\0c", "text.txt is a binary file (a zero byte at position 2): give UTF-8 text"),
        (
            b"a few words",
            "the text has 12 tokens, too few for one sequence of 256 (and the token after it): "
            "give a longer text or --seq 11",
        ),
    ],
)
def test_train_wrong_text(cli, tmp_path, monkeypatch, data, said):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if data is not None:
        (tmp_path / "text.txt").write_bytes(data)
    assert error_of(cli, "train", "--text", "text.txt") == said


def test_train_save_where_a_file_is(cli, tmp_path):
    (tmp_path / "taken").write_text("")
    assert error_of(cli, "train", "--save", "taken") == "cannot write to taken: it is a file, not a folder"


def as_nobody(*arguments: str, folder: Path) -> tuple[int, str]:
    """Runs a command line without root's right to write everywhere."""
    script = (
        # The first two runs import everything: modules may lie in a home folder that is closed to others.
        "import os, sys; from interlace.cli import app; os.chdir(sys.argv[1]); "
        "app.run(['train', '--save', 'small.il']); app.run(['opt', 'small.il', '-o', 'warm.il']); "
        "os.geteuid() or os.setuid(65534); raise SystemExit(app.run(sys.argv[2:]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(folder), *arguments], capture_output=True, text=True, check=False
    )
    return result.returncode, result.stderr.splitlines()[-1]


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs user ids")
def test_no_write_permission(tmp_path, program):
    for folder in (tmp_path, *tmp_path.parents[:2]):  # pytest's folders are closed to others
        folder.chmod(0o755)
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o555)
    assert as_nobody("train", "--save", "closed/run", folder=tmp_path) == (
        1,
        "error: cannot write to closed/run: Permission denied",
    )
    assert as_nobody("opt", "small.il", "-o", "closed/out.il", folder=tmp_path) == (
        1,
        "error: cannot write closed/out.il: Permission denied",
    )


# ---- opt and inspect ----


def test_opt_prints_and_writes_the_same(cli, tmp_path, program):
    code, out, _ = cli("opt", "--passes=canonicalize", "small.il")
    assert code == 0 and "aten.neg" not in out and "aten.mul" in out
    code, _, err = cli("opt", "--passes=canonicalize", "small.il", "-o", "out.il")
    assert code == 0 and (tmp_path / "out.il").read_text() == out
    assert "canonicalize" in err and "wrote out.il (captured" in err
    code, again, _ = cli("opt", "out.il")
    assert (code, again) == (0, out)


def test_opt_shards_and_dumps(cli, tmp_path, program):
    passes = "--passes=canonicalize,shard(axis=dp,ranks=2)"
    code, out, _ = cli("opt", passes, "--dump-ir", "steps", "small.il", "-o", "out.il", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["level"] == "sharded" and [p["changed"] for p in facts["passes"]] == [True, True]
    assert len(list((tmp_path / "steps").iterdir())) == 3
    assert "gather.start" in (tmp_path / "out.il").read_text()


def test_opt_lists_passes(cli):
    code, out, _ = cli("opt", "--list")
    assert code == 0 and all(name in out for name in ("canonicalize", "shard", "zero1", "accumulate", "update"))
    code, out, _ = cli("opt", "--list", "--json")
    assert code == 0 and "shard" in [p["name"] for p in json.loads(out)["passes"]]


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "no program file: name one, or - for stdin (examples: interlace opt --help)"),
        (["absent.il"], "no such file: absent.il"),
        (["."], ". is a folder: name a program file"),
        (
            ["small.il", "--json"],
            "--json and the program would both go to stdout: give the program a file with -o FILE",
        ),
        (["small.il", "--bind", "b"], "--bind 'b': 'b' is not NAME=NUMBER, for example b=4,s=128"),
        (["small.il", "--bind", "b=\u00b2"], "--bind 'b=\u00b2': 'b=\u00b2' is not NAME=NUMBER, for example b=4,s=128"),
        (
            ["small.il", "--bind", "b=99999999999999999999"],
            "--bind 'b=99999999999999999999': a size of 20 digits does not fit in 64 bits",
        ),
        (["small.il", "-o", "no/such/out.il"], "cannot write no/such/out.il: there is no folder no/such"),
        (["small.il", "-o", "."], "cannot write .: it is a folder"),
    ],
)
def test_opt_wrong_input(cli, program, arguments, said):
    assert error_of(cli, "opt", *arguments) == said


def test_opt_unknown_pass_and_option(cli, program):
    said = error_of(cli, "opt", "--passes=canonicalise", "small.il")
    assert "canonicalise" in said and "did you mean 'canonicalize'?" in said
    said = error_of(cli, "opt", "--passes=shard(rank=2)", "small.il")
    assert "did you mean 'ranks'?" in said


@pytest.mark.parametrize("command", ["inspect", "opt"])
def test_damaged_program_files(cli, tmp_path, command):
    def said(data: bytes) -> str:
        (tmp_path / "bad.il").write_bytes(data)
        return error_of(cli, command, "bad.il")

    assert said(b"") == "bad.il is empty: a program begins with a line such as 'interlace 1 captured'"
    assert said(b"interlace 1 captured\n\xff") == (
        "bad.il is not a program text: byte 0xff at position 21 is not UTF-8"
    )
    assert said(SMALL[:-3].encode()).startswith("bad.il:")  # cut
    assert "version 7" in said(SMALL.replace("interlace 1", "interlace 7").encode())
    edited = said(SMALL.replace("(%0, %1)", "(%0, %9)").encode())
    assert edited.startswith("bad.il:6:") and "%9" in edited


def test_inspect_tables_and_json(cli, program):
    code, out, _ = cli("inspect", "small.il")
    assert code == 0
    assert "small.il (captured)" in out and "tiny" in out and "x f32[4]" in out
    assert "1 tensors, 4 elements" in out and "micro_batch" in out
    code, out, _ = cli("inspect", "small.il", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["level"] == "captured" and facts["ops"] == 4 and facts["param_elements"] == 4
    assert facts["phases"][0]["kinds"]["compute"] == 3 and facts["meta"] == {"model": "tiny"}


def test_inspect_names_units(cli, program):
    assert cli("opt", "--passes=shard(axis=dp,ranks=2)", "small.il", "-o", "sharded.il")[0] == 0
    code, out, _ = cli("inspect", "sharded.il")
    assert code == 0 and "mesh dp=2" in out and "u0" in out and "256 B" in out and "128 B" in out
    facts = json.loads(cli("inspect", "sharded.il", "--json")[1])
    assert facts["unit_list"][0]["params"] == ["w"] and facts["largest_unit"] == "u0"
