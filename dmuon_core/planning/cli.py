"""The commands ``plan`` and ``measure`` of ``python -m dmuon_core``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

from dmuon_core.optim.cost import NewtonSchulzFlops
from dmuon_core.optim.newton_schulz import STEPS
from dmuon_core.optim.polar import ScheduleName
from dmuon_core.planning.hardware import Hardware, parse_hardware, parse_quantity
from dmuon_core.planning.layout import Layout
from dmuon_core.planning.measure import Probe, measure
from dmuon_core.planning.plot import draw
from dmuon_core.planning.recommend import Limits, Option, Recommendation, evaluate, layouts, recommend
from dmuon_core.planning.report import phase_bytes, report, warnings
from dmuon_core.planning.shapes import ModelShapes
from dmuon_core.planning.source import expert_share, load_shapes
from dmuon_core.planning.timing import Work

_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status. Errors of the arguments go to stderr, in one line."""
    parser = argparse.ArgumentParser(prog="python -m dmuon_core", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_plan(commands)
    _add_measure(commands)
    parsed = parser.parse_args(arguments)
    try:
        parsed.run(parsed)
    except ValueError as error:
        sys.stderr.write(f"python -m dmuon_core: {' '.join(str(error).split())}\n")
        return 2
    return 0


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser("plan", help="what training a model on a mesh will take")
    plan.set_defaults(run=_plan)
    plan.add_argument("model", help="package.module:factory, a config.json of Hugging Face, or a .json/.csv of shapes")
    mesh = plan.add_argument_group("mesh")
    mesh.add_argument("--shard", type=int, help="G, shard ranks; with --replicate R replicas of them")
    mesh.add_argument("--replicate", type=int, help="R; 1 if not given")
    mesh.add_argument("--devices", type=int, help="how many ranks; every (G, R) is compared if --hardware is given")
    mesh.add_argument("--per-node", type=int, default=8, help="ranks of one node (8)")
    machine = plan.add_argument_group("machine")
    machine.add_argument("--hardware", help="intra=400GB/s,inter=50GB/s,flops=400T[,memory=3TB/s,ns_flops=...,latency="
                         "10us,overlap=1], each of one rank; or a file that `measure` wrote")  # fmt: skip
    machine.add_argument("--memory", help="of one device, such as 80GB: what needs more is not recommended")
    machine.add_argument("--activations", help="bytes that activations take, which are not predicted")
    work = plan.add_argument_group("work of one rank in a step")
    work.add_argument("--tokens", type=int, default=8192, help="8192")
    work.add_argument("--sequence", type=int, default=4096, help="tokens of one sequence, for attention (4096)")
    work.add_argument("--recompute", action="store_true", help="activation checkpointing around every block")
    options = plan.add_argument_group("training")
    options.add_argument("--match", nargs="+", metavar="GLOB", help="names of what Muon trains, for its own choice")
    options.add_argument("--dtype", choices=_DTYPES, help="of the parameters; the model's own if not given")
    options.add_argument("--param-dtype", choices=_DTYPES, help="as in MixedPrecisionPolicy")
    options.add_argument("--reduce-dtype", choices=_DTYPES, help="as in MixedPrecisionPolicy")
    options.add_argument("--master-dtype", choices=[*_DTYPES, "none"], default="float32", help="as in dedicate_params")
    options.add_argument("--max-owned", help="as max_owned_bytes of dedicate_params, such as 2GB")
    options.add_argument("--ns-form", choices=("direct", "gram", "auto"), default="direct", help="as in Muon")
    options.add_argument("--ns-dtype", choices=_DTYPES, default="bfloat16", help="as in Muon")
    options.add_argument("--ns-steps", type=int, default=STEPS, help="as in Muon")
    options.add_argument("--ns-coefficients", choices=get_args(ScheduleName), default="quintic", help="as in Muon")
    options.add_argument("--normuon", action="store_true")
    options.add_argument(
        "--expert-share", type=float, help="share of tokens that one routed expert sees, such as 0.0625"
    )
    output = plan.add_argument_group("output")
    output.add_argument("--owners", action="store_true", help="list the owner of every matrix")
    output.add_argument("--json", action="store_true", help="print JSON: bytes and seconds")
    output.add_argument("--plot", type=Path, metavar="FILE", help="draw it too: .png, .svg or .pdf; needs matplotlib")


def _add_measure(commands: Any) -> None:
    command = commands.add_parser(
        "measure", help="measure this machine for `plan --hardware`; start it with torchrun, as the training"
    )
    command.set_defaults(run=_measure)
    command.add_argument("--json", type=Path, required=True, metavar="FILE", help="where the constants go")
    command.add_argument("--widths", type=int, nargs="+", default=list(Probe.widths), help="of layers and matrices")
    command.add_argument("--tokens", type=int, default=Probe.tokens, help="of one rank's batch")
    command.add_argument("--sequence", type=int, default=Probe.sequence)
    command.add_argument("--ns-dtype", choices=_DTYPES, default="bfloat16")
    command.add_argument("--group", type=int, help="ranks of one collective, if not all of them")
    command.add_argument("--rounds", type=int, default=10)


def _plan(parsed: argparse.Namespace) -> None:
    shapes = load_shapes(parsed.model, patterns=parsed.match, dtype=_DTYPES.get(parsed.dtype),
                         master_dtype=_DTYPES.get(parsed.master_dtype))  # fmt: skip
    share = parsed.expert_share if parsed.expert_share is not None else expert_share(parsed.model)
    if share is not None:
        if not 0 < share <= 1:
            raise ValueError(f"--expert-share must be above 0 and at most 1, got {share}")
        shapes = shapes.with_expert_share(share)
    hardware = None if parsed.hardware is None else parse_hardware(parsed.hardware)
    if parsed.tokens < 1 or parsed.sequence < 1 or parsed.per_node < 1:
        raise ValueError("--tokens, --sequence and --per-node must be at least 1")
    _check_folder(parsed.plot, "--plot")
    work = Work(parsed.tokens, min(parsed.sequence, parsed.tokens), parsed.per_node, parsed.recompute)
    limits = Limits(
        _bytes(parsed.memory, "--memory"),
        _bytes(parsed.activations, "--activations") or 0,
        _bytes(parsed.max_owned, "--max-owned"),
    )
    layout = _layout(parsed)
    if hardware is not None and hardware.inter is None and layout.ranks > parsed.per_node:
        raise ValueError(
            f"hardware: {layout.ranks} ranks at --per-node {parsed.per_node} are on several nodes: give inter, as in "
            "inter=50GB/s"
        )
    if limits.activations and limits.memory is None:
        raise ValueError("--activations says what is not left of --memory: give that, such as --memory 80GB")
    option, other, found = _choose(parsed, layout, shapes, hardware, work, limits)
    if parsed.plot is not None:
        draw(sorted((option, other), key=lambda o: not o.layout.zero3), parsed.plot)
    if parsed.json:
        sys.stdout.write(json.dumps(as_json(option, other, found), indent=2) + "\n")
    else:
        sys.stdout.write(
            report(
                option,
                other,
                found,
                normuon=parsed.normuon,
                all_owners=parsed.owners,
                limited=limits.memory is not None,
            )
        )


def _choose(
    parsed: argparse.Namespace,
    layout: Layout,
    shapes: ModelShapes,
    hardware: Hardware | None,
    work: Work,
    limits: Limits,
) -> tuple[Option, Option, Recommendation | None]:
    """The layout to report on, the same in the other mode, and the recommendation where one was asked for."""

    def take(one: Layout) -> Option:
        return evaluate(shapes, one, hardware, work, limits, parsed.normuon)

    found = None
    if hardware is not None:
        fixed = parsed.shard is not None
        candidates = [layout, replace(layout, zero3=False)] if fixed else layouts(layout.ranks, layout)
        found = recommend([take(candidate) for candidate in candidates])
        if found.best is not None:
            layout = found.best.layout
    return take(layout), take(replace(layout, zero3=not layout.zero3)), found


def _layout(parsed: argparse.Namespace) -> Layout:
    flops = NewtonSchulzFlops(parsed.ns_coefficients, parsed.ns_steps, parsed.ns_dtype, parsed.ns_form)
    options = (_DTYPES.get(parsed.param_dtype), _DTYPES.get(parsed.reduce_dtype), flops)
    if parsed.shard is None and parsed.devices is None:
        raise ValueError("the mesh is missing: give --shard G [--replicate R], or --devices N")
    for option in ("shard", "replicate", "devices"):
        count = getattr(parsed, option)
        if count is not None and count < 1:
            raise ValueError(f"--{option} must be at least 1, got {count}: a mesh has at least one rank each way")
    if parsed.shard is None and parsed.replicate is not None:
        if parsed.devices % parsed.replicate:
            raise ValueError(f"{parsed.devices} devices do not divide into {parsed.replicate} replicas")
        parsed.shard = parsed.devices // parsed.replicate
    if parsed.shard is None:
        node = parsed.per_node
        shard = node if parsed.devices % node == 0 else parsed.devices
        return Layout(shard, parsed.devices // shard, True, *options)
    layout = Layout(parsed.shard, 1 if parsed.replicate is None else parsed.replicate, True, *options)
    if parsed.devices is not None and parsed.devices != layout.ranks:
        raise ValueError(
            f"--shard {layout.shard} x --replicate {layout.replicate} are {layout.ranks} ranks, not "
            f"--devices {parsed.devices}: leave one of them out"
        )
    return layout


def _check_folder(path: Path | None, what: str) -> None:
    """Before the work, not after it."""
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"{what}: there is no folder '{path.parent}'")


def _bytes(text: str | None, what: str) -> int | None:
    return None if text is None else int(parse_quantity(text, "bytes", what))


def as_json(option: Option, other: Option, found: Recommendation | None) -> dict[str, Any]:
    """Everything in the report, in bytes and seconds."""

    def one(of: Option) -> dict[str, Any]:
        return {
            "memory": of.memory.as_dict(),
            "traffic": phase_bytes(of.placed),
            "times": None if of.times is None else of.times.as_dict(),
            "publish_hides": None if of.times is None else of.times.hides,
            "fits": of.fits,
        }

    def name(of: Option | None) -> dict[str, Any] | None:
        if of is None:
            return None
        layout = of.layout
        return {"mode": layout.mode, "shard": layout.shard, "replicate": layout.replicate}

    assignment = option.placed.assignment
    recommended = None
    if found is not None:
        options = [{**(name(o) or {}), "step": o.times and o.times.step, "memory": o.memory.total, "fits": o.fits}
                   for o in found.options]  # fmt: skip
        recommended = {"best": name(found.best), "runner_up": name(found.runner_up), "reasons": list(found.reasons),
                       "options": options}  # fmt: skip
    return {
        "model": option.placed.shapes.name,
        "warnings": warnings(option.placed.shapes),
        "parameters": option.placed.shapes.numel,
        "layout": name(option),
        "owners": dict(assignment.owners),
        "busiest_over_bound": assignment.ratio,
        "owned_bytes": list(assignment.owned_bytes),
        option.layout.mode: one(option),
        other.layout.mode: one(other),
        "recommended": recommended,
    }


def _measure(parsed: argparse.Namespace) -> None:
    if not dist.is_torchelastic_launched():
        raise ValueError(
            "start it with torchrun, as the training: torchrun --nproc_per_node 2 -m dmuon_core measure ..."
        )
    _check_folder(parsed.json, "--json")
    dist.init_process_group()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    probe = Probe(tuple(parsed.widths), parsed.tokens, parsed.sequence, _DTYPES[parsed.ns_dtype], parsed.group)
    try:
        hardware = measure(probe, parsed.rounds, device)
        if dist.get_rank() == 0:
            parsed.json.write_text(hardware.to_json())
    finally:
        dist.destroy_process_group()
