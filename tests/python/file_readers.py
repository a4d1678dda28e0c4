"""Every reader in Python of a file that somebody else may have written, with a small file for it (mutated_files.py)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from interlace.calibrate.runs import read_runs
from interlace.checkpoint import convert
from interlace.checkpoint.contents import CHECKSUMS, FORMAT, MODEL, OPTIMIZER, TRAINER, Checkpoint
from interlace.checkpoint.scheduler import SCHEDULER, scheduler_state, scheduler_text
from interlace.checkpoint.tensor_file import CheckpointError, checksum_text, sums_of
from interlace.checkpoint.weights import Weights
from interlace.cli import run_record
from interlace.cli.run_config import as_toml, read_config
from interlace.cli.settings import SettingError, TrainSettings
from interlace.compiling.cache import Cache
from interlace.cost import store as cost_store
from interlace.cost.store import Store, StoreError
from interlace.data import text as texts
from interlace.data import tokens
from interlace.data.text import DataError
from interlace.errors import InterlaceError
from interlace.models import lookup
from interlace.regions import kept
from interlace.report.run_log import read_log


def _all(name: str) -> bool:
    return True


def _as_it_is(name: str, data: bytes) -> bytes:
    return data


def _write(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)


@dataclass
class Reader:
    """`checked`: it has checksums, and gives what was written, None, or an error. `opened` and `put`: what is changed of a file, and how the
    changed part comes into it."""

    name: str
    make: Callable[[Path], None]
    read: Callable[[Path], Any]
    errors: tuple[type[Exception], ...] = ()
    checked: bool = False
    takes: Callable[[str], bool] = _all
    opened: Callable[[str, bytes], bytes] = _as_it_is
    put: Callable[[Path, str, bytes], None] = _write


# ---- checkpoints ----


def _linear() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])


def make_checkpoint(folder: Path) -> None:
    model, optimizer = _linear()
    names = [name for name, _ in model.named_parameters()]
    moments = {f"{role}.{n}": torch.ones_like(p) for n, p in model.named_parameters() for role in ("exp_avg", "exp_avg_sq")}
    hyper = {k: list(v) if isinstance(v, tuple) else v for k, v in optimizer.param_groups[0].items() if k != "params"}
    record = {
        "format": FORMAT, "step": 3, "kind": ["adamw"], "groups": [{"steps": 3, "hyper": hyper, "parameters": names}], "seed": 0,
        "rng": "keyed", "world_size": 1, "loss_scale": None, "loop": {"count": 3},
    }  # fmt: skip
    kept_settings = {name: getattr(TrainSettings(), name) for name in run_record.KEPT_ON_RESUME}
    run = run_record.RunRecord(3, "digest", kept_settings, 24, 1000, [0, 1, 2, 3]).to_json()
    small = {run_record.RUN_FILE: run, SCHEDULER: scheduler_text(_scheduler(optimizer))}
    where = folder / "c"
    convert.write_checkpoint(where, {MODEL: dict(model.state_dict()), OPTIMIZER: moments}, record, small)


def read_checkpoint(folder: Path) -> Any:
    with Checkpoint(folder / "c") as found:
        found.verify()
        tensors = [found.tensors(file) for file in (MODEL, OPTIMIZER)]
        values = {name: file.read(name).tolist() for file in tensors for name in file.names()}
        return json.dumps([found.record, values, found.read(SCHEDULER).decode()], sort_keys=True)


def forge(folder: Path, name: str, data: bytes) -> None:
    """With the checksums that belong to it."""
    _write(folder, name, data)
    index = folder / "c" / CHECKSUMS
    if Path(name).name == CHECKSUMS:
        text = data.rpartition(b',"self":"')[0] or data
        index.write_bytes(text + b',"self":"' + checksum_text(text + b"}").encode() + b'"}\n')
        return
    body = json.loads(index.read_bytes())
    body.pop("self")
    body["files"][Path(name).name] = {"bytes": len(data), "ranges": sums_of(data)}
    text = json.dumps(body, separators=(",", ":"))
    index.write_text(f'{text[:-1]},"self":"{checksum_text(text.encode())}"}}\n')


_trainers: dict[str, Any] = {}


def _trainer(kind: str) -> Any:
    """Of this process: the trainer, its model, optimizer, scheduler and batch."""
    import interlace

    if kind not in _trainers:
        model, optimizer = _linear()
        if kind == "rule":
            optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1)
        config = interlace.Config(cache="off", **({} if kind == "rule" else {"schedule": []}))
        batch = torch.ones(2, 3)
        loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
        scheduler = _scheduler(optimizer)
        _trainers[kind] = interlace.compile(model, optimizer, loss, batch, config), model, optimizer, scheduler, batch
    return _trainers[kind]


def make_saved(folder: Path, kind: str) -> None:
    trainer, _, _, scheduler, batch = _trainer(kind)
    for _ in range(3):
        trainer.step(batch)
        scheduler.step()
    trainer.save(folder / "c", scheduler=scheduler)


def load_forged(folder: Path, kind: str) -> Any:
    """Into a trainer: an error changes nothing in it, and after one that was loaded a step can be made or says why not."""
    trainer, model, optimizer, scheduler, batch = _trainer(kind)

    def state() -> str:
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        return repr([trainer.steps, [p.tolist() for p in model.parameters()], groups, scheduler.state_dict()])

    before = state()
    try:
        trainer.load(folder / "c", scheduler=scheduler)
    except InterlaceError:
        if state() != before:
            raise AssertionError("an error of load that has changed the trainer") from None
        raise
    trainer.step(batch)
    return None


def read_record(folder: Path) -> Any:
    return vars(run_record.RunRecord.load(folder / "c"))


def read_scheduler(folder: Path) -> Any:
    scheduler = _scheduler(_linear()[1])
    with Checkpoint(folder / "c") as found:
        scheduler.load_state_dict(scheduler_state(found.read(SCHEDULER), scheduler))
    scheduler.state_dict()


# ---- weights and .pt files ----


def make_weights(folder: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(3)}
    save_file(tensors, folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "part.safetensors")}))


def read_weights(folder: Path) -> Any:
    weights = Weights(folder)
    try:
        for name in weights.names():
            size = int(torch.Size(weights.shape(name)).numel())
            assert weights.read(name).numel() == weights.read_range(name, 0, size).numel() == size
    finally:
        weights.close()
    return True


def make_torch(folder: Path) -> None:
    model, optimizer = _linear()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "x.pt")


def read_torch(folder: Path) -> Any:
    shutil.rmtree(folder / "out", ignore_errors=True)
    return convert.import_torch(folder / "x.pt", folder / "out")


# ---- caches ----


def make_cache(folder: Path) -> None:
    Cache(folder).put("plan", "k" * 40, {"text": "program " * 40, "n": 3}, {"t": torch.arange(20.0)})


def read_cache(folder: Path) -> Any:
    found = Cache(folder).get("plan", "k" * 40)
    return None if found is None else (found[0], {n: t.tolist() for n, t in found[1].items()})


def _unpacked(name: str, data: bytes) -> bytes:
    return zlib.decompress(data.partition(b"\n")[2])


def forge_cache(folder: Path, name: str, data: bytes) -> None:
    head, _, _ = (folder / name).read_bytes().partition(b"\n")
    packed = zlib.compress(data, 1)
    fields = {**json.loads(head), "bytes": len(packed), "unpacked": len(data), "digest": hashlib.sha256(packed).hexdigest()}
    (folder / name).write_bytes(json.dumps(fields).encode() + b"\n" + packed)


BYTE = tokens.Tokenizer.byte()


def make_tokens(folder: Path) -> None:
    (folder / "text.txt").write_text("some words, and some more words\n" * 20)
    tokens.prepare_tokens(texts.find_text(folder / "text.txt"), folder / "cache")


def read_tokens(folder: Path) -> Any:
    (note,) = (folder / "cache").glob("*.json")
    found = tokens._load_cached(folder / "cache", note.stem, BYTE)
    return None if found is None else found.open().tolist()


ROWS = {("op", f"aten.mm {i}"): {"us": 1.5 * i, "bytes": 100.0} for i in range(20)}


def make_store(folder: Path) -> None:
    with Store(folder / "p.sqlite") as store:
        store.put("m", ROWS)


def read_store(folder: Path) -> Any:
    for suffix in ("-wal", "-shm"):
        (folder / f"p.sqlite{suffix}").unlink(missing_ok=True)
    with Store(folder / "p.sqlite") as store:
        rows = store.rows("m")
    if any(rows[key] != ROWS.get(key) for key in rows):
        return rows
    return None  # a row that is lost is measured again


def forge_store(folder: Path, name: str, data: bytes) -> None:
    """A row whose value is something else."""
    with Store(folder / name) as store:
        text = data.decode(errors="replace")
        fields = ("m", "op", "aten.mm 1", text, 1.0, cost_store._sum("m", "op", "aten.mm 1", text))
        store._db.execute("insert or replace into measurements (machine, kind, key, value, at, sum) values (?, ?, ?, ?, ?, ?)", fields)
        store._db.execute("pragma wal_checkpoint(truncate)")


def make_regions(folder: Path) -> None:
    (folder / "r").mkdir(mode=0o700)
    kept.put(folder / "r" / "x.so", "key", {"one": 1, "two": [3]}, bytes(range(256)) * 2)


def read_regions(folder: Path) -> Any:
    return kept.read(folder / "r" / "x.so", "key", lambda said: None)


# ---- texts ----


def read_toml(folder: Path) -> Any:
    return read_config(str(folder / "run.toml"))


def make_tokenizer(folder: Path) -> None:
    words = ["some words and some more words, and a few others"] * 50
    tokens.Tokenizer.train_bpe(iter(words), 270).save(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": tokens.END}}))


def read_tokenizer(folder: Path) -> Any:
    tokenizer = tokens.Tokenizer.pretrained(folder)
    ids = [int(i) for i in tokenizer.encode(["some words \u00e9"])[0]]
    if ids and max(ids) >= tokenizer.vocab_size:
        raise AssertionError("a token outside the vocabulary")
    tokenizer.decode(ids)


def make_lines(folder: Path) -> None:
    (folder / "x.jsonl").write_text("".join(json.dumps({"text": f"document {i} \u00e9", "n": i}) + "\n" for i in range(12)))


def read_lines(folder: Path) -> Any:
    return sum(len(piece.encode()) for piece, _ in texts.read_documents(folder / "x.jsonl"))


def make_log(folder: Path) -> None:
    lines: list[dict[str, Any]] = [{"step": i, "loss": 9.5 - i, "seconds": 0.1, "lr": 1e-3, "memory_bytes": 1 << 20} for i in range(1, 9)]
    lines += [{"step": 4, "eval_loss": 6.2}, {"step": 5, "regions": {"regions": 2, "calls": 5}}, {"step": 6, "plan": "another"}]
    (folder / "log").write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_log_file(folder: Path) -> Any:
    found = read_log((folder / "log").read_text(errors="replace"), "log")
    json.dumps(found.summary())


def make_runs(folder: Path) -> None:
    rows = ["model,gpu,gpus,micro_batch,global_batch,seq,step_ms", "gpt2,a100-40gb,8,4,64,1024,250.5", "gpt2,a100-40gb,16,4,128,1024,260"]
    (folder / "runs.csv").write_text("\n".join(rows) + "\n")


def make_config(folder: Path) -> None:
    options = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
               "torch_dtype": "float32", "rope_scaling": None}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(options, indent=1))


def read_model_config(folder: Path) -> Any:
    lookup.resolve(str(folder))
    with contextlib.suppress(InterlaceError):
        lookup.config_of(str(folder))


def _named(*names: str) -> Callable[[str], bool]:
    return lambda path: Path(path).name in names


READERS = {
    reader.name: reader
    for reader in (
        Reader("checkpoint", make_checkpoint, read_checkpoint, (CheckpointError,), checked=True),
        *(
            Reader(f"load-{kind}", partial(make_saved, kind=kind), partial(load_forged, kind=kind), (InterlaceError,),
                   takes=_named(TRAINER, SCHEDULER, MODEL, OPTIMIZER, CHECKSUMS), put=forge)
            for kind in ("adamw", "rule")
        ),
        Reader("run", make_checkpoint, read_record, (CheckpointError, SettingError), takes=_named(run_record.RUN_FILE), put=forge),
        Reader("scheduler", make_checkpoint, read_scheduler, (CheckpointError,), takes=_named(SCHEDULER), put=forge),
        Reader("weights", make_weights, read_weights, (InterlaceError,)),
        Reader("torch", make_torch, read_torch, (CheckpointError,)),
        Reader("cache", make_cache, read_cache, checked=True),
        Reader("cache-forged", make_cache, read_cache, opened=_unpacked, put=forge_cache),
        Reader("tokens", make_tokens, read_tokens, checked=True, takes=lambda path: path.endswith((".json", ".tokens"))),
        Reader("store", make_store, read_store, (StoreError,), checked=True),
        Reader("store-forged", make_store, read_store, (StoreError,), opened=lambda name, data: b'{"us": 1.5, "n": 100}', put=forge_store),
        Reader("regions", make_regions, read_regions, (kept.RegionsError,), checked=True),
        Reader("toml", lambda f: (f / "run.toml").write_text(as_toml(TrainSettings())) and None, read_toml, (SettingError,)),
        Reader("tokenizer", make_tokenizer, read_tokenizer, (DataError,)),
        Reader("jsonl", make_lines, read_lines, (DataError,)),
        Reader("log", make_log, read_log_file, (InterlaceError,)),
        Reader("runs", make_runs, lambda f: len(read_runs(f / "runs.csv")), (InterlaceError,)),
        Reader("config", make_config, read_model_config, (InterlaceError,)),
    )
}
