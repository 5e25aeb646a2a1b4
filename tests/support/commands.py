"""A folder as users of the command line have it: a network's code and weights, and tables; and how to run commands."""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import safetensors.torch
import torch

from deltaband.cli import main

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-P", "-m", "deltaband.cli"]  # -P: as the installed script, without the current folder
FIT = ["fit", "network:make", "--weights", "w.pt", "--train", "train.csv", "--target", "y", "--features", "a,b"]
NETWORK = """
import os, time
from pathlib import Path
import torch
from torch import nn

Path(__file__).with_name("imported").touch()  # whoever imports this is found out


class Slow(nn.Sequential):
    def forward(self, x):
        if "SLOW" in os.environ:
            Path("under_way").touch()
            time.sleep(float(os.environ["SLOW"]))
        return super().forward(x)


def layers(m):
    return nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, m)


def make():
    return nn.Sequential(*layers(1))


def slow():
    return Slow(*layers(1))


def two():
    torch.manual_seed(1)
    return nn.Sequential(*layers(2))


def wide():
    return nn.Sequential(nn.Linear(2, 9), nn.Tanh(), nn.Linear(9, 1))


def broken():
    raise RuntimeError("the weights\\nare elsewhere")


def asking(size):
    return nn.Linear(size, 1)


def number():
    return 3


trained = make()
trained.load_state_dict(torch.load(Path(__file__).with_name("w.pt"), weights_only=True))
"""


class Evil:
    def __reduce__(self):
        return os.system, ("touch ran",)


def rows(n: int, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    a, b = rng.uniform(-1, 1, (2, n))
    y = np.sin(3 * a) + b + 0.1 * rng.standard_normal(n)
    return pd.DataFrame({"a": a, "b": b, "y": y, "z": 10 * b - 3, "note": [f"row {i}, or so" for i in range(n)]})


def make_folder(folder: Path) -> None:
    train, test = rows(150, 0), rows(80, 1)
    train.to_csv(folder / "train.csv", index=False)
    test[["note", "b", "y", "z", "a"]].to_csv(folder / "test.csv", index=False)  # another order
    test.to_parquet(folder / "test.parquet", index=False)
    np.savez(folder / "train.npz", X=train[["a", "b"]].to_numpy(), y=train.y.to_numpy())
    np.savez_compressed(
        folder / "test.npz", X=test[["a", "b"]].to_numpy(np.float32), y=test.y, k=test.note.to_numpy(str)
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    x, y = (torch.tensor(train[names].to_numpy(), dtype=torch.float32) for names in (["a", "b"], ["y"]))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.03, weight_decay=1e-3)
    for _ in range(200):
        optimiser.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimiser.step()
    torch.save(model.state_dict(), folder / "w.pt")
    safetensors.torch.save_file(model.state_dict(), folder / "w.safetensors")
    torch.save({"0.weight": Evil()}, folder / "evil.pt", pickle_module=pickle)
    (folder / "network.py").write_text(NETWORK)


def start(*arguments: object, folder: Path, python: list[str] | None = None, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*(python or COMMAND), *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_heed_ctrl_c if os.name == "posix" else None,
    )


def _heed_ctrl_c() -> None:
    """A program that a shell runs in the background ignores Ctrl-C, and so do its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run(*arguments: object, folder: Path, **options) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the real command."""
    process = start(*arguments, folder=folder, **options)
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


@contextmanager
def commands_in(folder: Path, monkeypatch: Any, module: str) -> Iterator[Path]:
    """Run commands in this folder and process; what they leave in it goes again, and so does the network's module."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    before = set(folder.iterdir())
    yield folder
    for path in set(folder.iterdir()) - before:
        if path.is_file():
            path.unlink()
    sys.modules.pop(module, None)


def told(capsys: Any, *arguments: Any) -> Any:
    """What a command that succeeds prints, as JSON."""
    assert main([*map(str, arguments), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def refused(capsys: Any, code: int, message: str, *arguments: Any) -> None:
    """Assert that a command fails with this exit code and one line that holds this message."""
    assert main([*map(str, arguments)]) == code
    err = capsys.readouterr().err
    assert err.startswith("deltaband: error: ")
    assert err.count("\n") == 1
    assert message in err
