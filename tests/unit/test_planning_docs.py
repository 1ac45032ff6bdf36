"""The sample in docs/planning.md is what its command prints for its config."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dmuon_core.planning.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the docs are not part of this copy")
def test_the_sample_is_true(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("transformers")
    text = PAGE.read_text()
    config = re.search(r"```json\n(.*?)```", text, re.DOTALL)
    command = re.search(r"python -m dmuon_core (plan llama\.json.*?)\n```", text, re.DOTALL)
    sample = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    assert config and command and sample
    monkeypatch.chdir(tmp_path)
    Path("llama.json").write_text(config[1])
    assert main(shlex.split(command[1].replace("\\\n", " "))) == 0
    assert capsys.readouterr().out == sample[1]
