"""Scripts as users start them, with `accelerate launch`. Each costs some seconds a process only to import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import compare_versions

from tests.accelerate.runs import difference
from tests.accelerate.test_checkpoint import HALF, _save
from tests.distributed.harness import run_distributed
from tests.distributed.reference import LOSS_ATOL, Recipe, train_reference

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/accelerate"
SCRIPT = str(ROOT / "tests/accelerate/scripts/hf.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def start(*command: str | Path, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    """A Python of its own, in which a launched process may use FSDP2 on the CPU."""
    environment = {
        **{
            name: value for name, value in os.environ.items() if not name.startswith(("FSDP_", "ACCELERATE_", "DMUON_"))
        },
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/accelerate/cpu")]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        **variables,
    }
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert not check or done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done


def launch(config: Path, *command: str | Path, processes: int = 2, **options: Any) -> subprocess.CompletedProcess[str]:
    """`accelerate launch`, by the module that it runs: the command imports what has nothing to do with it."""
    launcher = ["-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", "0"]
    return start(*launcher, "--num_processes", str(processes), *command, **options)


def test_the_example_equals_one_process(tmp_path: Path) -> None:
    example = [EXAMPLES / "train.py", "--steps", "6", "--ns-dtype", "float32"]
    start(*example, "--report", tmp_path / "one")
    out = launch(EXAMPLES / "dmuon.yaml", *example, "--report", tmp_path / "two", "--save", tmp_path / "state")
    launch(EXAMPLES / "hsdp.yaml", *example, "--report", tmp_path / "hsdp", processes=4)
    more = ["--load", tmp_path / "state", "--report", tmp_path / "loaded"]
    launch(EXAMPLES / "dmuon.yaml", *example, *more, processes=4)
    want = json.loads((tmp_path / "one").read_text())
    assert len(want) == 6
    for name in ("two", "hsdp", "loaded"):
        got = json.loads((tmp_path / name).read_text())
        assert len(got) == (3 if name == "loaded" else 6)
        assert max(abs(a - b) for a, b in zip(got, want[-len(got) :], strict=True)) <= LOSS_ATOL, name
    # One line, by the first rank, before anything else is trained.
    assert out.stderr.count("DMuon: 7 matrices (0.19 MiB) owned over 2 ranks") == 1


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("one")
    start(SCRIPT, "", folder, folder / "start")
    return {"start": folder / "start", **json.loads((folder / "report.0").read_text())}


@pytest.mark.parametrize("way", ["configured", "enable", "run"])
def test_trainers_of_transformers_and_trl_equal_one_process(
    way: str, one_process: dict[str, Any], tmp_path: Path
) -> None:
    folders = [tmp_path, one_process["start"]]
    if way == "run":
        out = launch(EXAMPLES / "dmuon.yaml", "-m", "dmuon_lightning.accelerate.run", SCRIPT, "", *folders)
    else:
        out = launch(EXAMPLES / "dmuon.yaml", SCRIPT, way, *folders)
    resumes = ["gpt2", "lora"] if compare_versions("accelerate", ">=", "1.15") else ["gpt2"]
    assert ("before 1.15 does not save adapters whole" in out.stderr) == ("lora" not in resumes)
    # Of two layers: q, k, v, o, gate, up, down; four fused ones; LoRA's A and B of q and up.
    owned = {"llama": 14, "gpt2": 8, "lora": 8, "bf16": 14, "sft": 14}
    if way == "configured":
        del owned["bf16"]
    for rank in range(2):
        got = json.loads((tmp_path / f"report.{rank}").read_text())
        for name, count in owned.items():
            assert len(got[name]["owned"]) == count
            assert len(got[name]["losses"]) == 4
            # Autocast, in the one process, rounds other things to 8 bits than FSDP2 does.
            tolerance = 2e-2 if name == "bf16" else LOSS_ATOL
            for key in ("losses", "norms", "last", "first"):
                assert_near(got[name][key], one_process[name][key], f"{name} {key}", tolerance)
            compute = "torch.bfloat16" if name == "bf16" else "torch.float32"
            assert got[name]["dtypes"] == [[compute], ["torch.float32"]]
        assert got["lora"]["trained"] == one_process["lora"]["trained"] != []
        for name in resumes:
            assert_near(got[name]["resumed"], one_process[name]["losses"], f"{name} resumed")
        assert_near(got["again"], one_process["again"], "again")
        if rank == 0:
            for name in ("llama", "gpt2"):
                assert_near(got[name]["reloaded"], one_process[name]["reloaded"], f"{name} reloaded")
            assert (got["llama"]["tied"], got["gpt2"]["tied"]) == (False, True)


def assert_near(got: Any, want: Any, what: str, tolerance: float = LOSS_ATOL) -> None:
    if want is None:
        assert got is None
        return
    assert torch.tensor(got).shape == torch.tensor(want).shape, what
    assert (torch.tensor(got) - torch.tensor(want)).abs().max() <= tolerance, what


def test_a_run_without_fsdp_is_an_error(tmp_path: Path) -> None:
    """On CPUs Accelerate lets each launched process train for itself: without the shim of these tests, here."""
    variables = {"PYTHONPATH": str(ROOT)}
    done = launch(EXAMPLES / "dmuon.yaml", EXAMPLES / "train.py", "--steps", "1", check=False, **variables)
    assert done.returncode != 0
    assert "no model was prepared with owned matrices: Accelerate runs this process as 'NO'" in done.stderr


def test_run_is_an_error_if_nothing_was_converted(tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text("import sys; print(__name__, sys.argv)")
    command = ("-m", "dmuon_lightning.accelerate.run", tmp_path / "says.py", "--lr", "1")
    done = start(*command, check=False, ACCELERATE_USE_FSDP="true")
    assert done.returncode == 1
    assert done.stdout == f"__main__ {[str(tmp_path / 'says.py'), '--lr', '1']}\n"
    assert "DMuon is on (dmuon_lightning.accelerate was enabled), but no model was prepared" in done.stderr
    without_launcher = start(*command, check=False)
    assert without_launcher.returncode == 1
    assert without_launcher.stdout == ""
    assert "start it with accelerate launch" in without_launcher.stderr


def test_a_checkpoint_loads_into_plain_fsdp2(tmp_path: Path) -> None:
    state = run_distributed(_save, 2, str(tmp_path))[0]["sharded"][1]
    plain = ROOT / "tests/accelerate/scripts/plain_fsdp2.py"
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    start(*run, plain, tmp_path / "sharded/half", tmp_path / "report")
    report = torch.load(tmp_path / "report")
    want = train_reference(Recipe(steps=3, max_norm=HALF.max_norm))
    assert report["ours"] == []
    assert abs(report["loss"] - want.losses[2]) <= LOSS_ATOL
    assert difference({"x": report["exp_avg"]}, {"x": state["head.weight/exp_avg"]}) == 0
