"""A plan as text."""

from __future__ import annotations

from collections.abc import Sequence

from dmuon_core.planning.layout import Placed
from dmuon_core.planning.memory import Memory
from dmuon_core.planning.recommend import Option, Recommendation
from dmuon_core.planning.shapes import ModelShapes
from dmuon_core.planning.timing import Times
from dmuon_core.planning.traffic import (
    Axis,
    Kind,
    Phase,
    Transfer,
    column_transfers,
    common_transfers,
    group_size,
    link_bytes,
    through_link,
)
from dmuon_core.planning.units import duration, size


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns side by side, the first one to the left, the others to the right."""
    lines = [heads, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    sides = [str.ljust, *[str.rjust] * (len(heads) - 1)]
    cells = [[side(*cell) for side, cell in zip(sides, zip(line, widths, strict=True), strict=True)] for line in lines]
    return ["  " + "  ".join(row).rstrip() for row in cells]


def report(
    option: Option,
    other_mode: Option,
    recommendation: Recommendation | None,
    *,
    normuon: bool = False,
    all_owners: bool = False,
    limited: bool = False,
) -> str:
    """Everything about ``option``, beside the same mesh in the ``other_mode`` (Z3 beside Z2).

    ``limited``: whether the memory of a device was given, so that to fit means something.
    """
    pair = sorted((option, other_mode), key=lambda o: not o.layout.zero3)
    shapes = option.placed.shapes
    parts = [
        [
            f"{shapes.name}: {shapes.numel / 1e6:,.1f} M parameters, {shapes.owned_numel / 1e6:,.1f} M of them in "
            f"{len(shapes.matrices)} owned matrices, {len(option.placed.owned)} hook modules",
            f"Layout: {option.layout}",
            *warnings(shapes),
        ],
        ["OWNERS (a slot is a rank)", str(option.placed.assignment), *owner_lines(option.placed, all_owners)],
        ["MEMORY of the fullest rank, without activations", *memory_lines([o.memory for o in pair], normuon)],
        ["TRAFFIC of one rank in a step", *traffic_lines([o.placed for o in pair])],
    ]
    timed = [(o.layout.mode, o.times) for o in pair if o.times is not None]
    if timed:
        parts.append(["PREDICTED STEP", *time_lines(timed)])
    else:
        parts.append(["No --hardware: no times and no recommendation."])
        if limited:
            answers = ", ".join(f"{one.layout.mode} {'fits' if one.fits else 'does not fit'}" for one in pair)
            parts.append([f"In --memory, with --activations: {answers}."])
    if recommendation is not None:
        parts.append(["RECOMMENDED", *recommendation_lines(recommendation)])
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def warnings(shapes: ModelShapes) -> list[str]:
    """What the shapes cannot tell about this model, a sentence each."""
    return [
        f"Warning: '{name}' is the module '{earlier}' again. The plan has it run once in a forward: each further call "
        "computes, and sends if it is a hook module, once more."
        for name, earlier in shapes.repeated
    ]


def owner_lines(placed: Placed, every: bool) -> list[str]:
    """Who owns what, of the first hook module or of ``every`` one."""
    units = list(placed.owned) if every else list(placed.owned)[:1]
    shown = [weight for unit in units for weight in placed.owned[unit]]
    rows = [[w.fqn, " x ".join(map(str, w.shape)), str(placed.assignment.owners[w.fqn])] for w in shown]
    more = len(placed.shapes.matrices) - len(shown)
    return [*table(["matrix", "shape", "rank"], rows), *([f"  ... {more} more with --owners"] if more else [])]


def memory_lines(both: Sequence[Memory], normuon: bool) -> list[str]:
    """What the figures mean is in `Memory`."""
    names = {
        "owned weights": "owned_weights",
        "momentum": "momentum",
        "NorMuon's second moment": "second_moment",
        "FSDP2 shards": "sharded_weights",
        "Adam moments": "adam",
        "= at rest": "at_rest",
        "owned gradients": "owned_gradients",
        "FSDP2 gradients": "sharded_gradients",
        "unsharded owned weights": "unsharded",
        "gradients on their way": "packed_gradients",
        "gradients of autograd": "local_gradients",
        "gathered by FSDP2": "gathered",
        "publish": "publish",
        "update of a matrix": "update",
        "= buffers at most": "buffers",
        "= all at most": "total",
    }
    if not normuon:
        del names["NorMuon's second moment"]
    rows = [[label, *(size(getattr(one, name)) for one in both)] for label, name in names.items()]
    return table(["", "Z3", "Z2"], rows)


def traffic_lines(both: Sequence[Placed]) -> list[str]:
    """Bytes of buffers, and through the busiest link, of the column that sends most over replicas."""
    found = [
        [*common_transfers(p), *max(column_transfers(p), key=lambda found: sum(t.nbytes for t in found))] for p in both
    ]
    rows = []
    for kind in Kind:
        mine = [[t for t in one if t.kind is kind] for one in found]
        if not any(mine):
            continue
        axis = (mine[0] or mine[1])[0].axis
        moved = [sum(through_link(t, group_size(p, axis)) for t in one) for p, one in zip(both, mine, strict=True)]
        rows.append([kind.value, axis.value, *(size(sum(t.nbytes for t in one)) for one in mine), *map(size, moved)])
    for axis, name in ((Axis.SHARD, "= along the row (shard)"), (Axis.REPLICATE, "= along the column (replicate)")):
        links = [link_bytes(p, one, axis) for p, one in zip(both, found, strict=True)]
        if any(links):
            rows.append([name, "", "", "", *map(size, links)])
    return table(["", "ranks", "buffers Z3", "Z2", "through a link Z3", "Z2"], rows)


def time_lines(timed: Sequence[tuple[str, Times]]) -> list[str]:
    """Parts of a step; what they are is in `Times`."""
    times = [one for _, one in timed]
    rows = [
        ["compute of forward and backward", *(duration(t.compute) for t in times)],
        ["their communication", *(duration(t.communication) for t in times)],
        ["forward", *(duration(t.forward) for t in times)],
        ["backward", *(duration(t.backward) for t in times)],
        ["waiting in both", *(duration(t.exposed) for t in times)],
        ["optimizer of the busiest rank", *(duration(t.optimizer) for t in times)],
    ]
    if times[0].publish:
        rows.append(["publish", *(duration(t.publish) for t in times)])
        rows.append(["  of which the next forward waits", *(duration(t.exposed_publish) for t in times)])
        rows.append(["  it hides", *("yes" if t.hides else "no" for t in times)])
    rows.append(["= step", *(duration(t.step) for t in times)])
    return table(["", *(mode for mode, _ in timed)], rows)


def recommendation_lines(found: Recommendation) -> list[str]:
    """The layouts that were compared, and the choice with its reasons."""
    rows = []
    for option in found.options:
        assert option.times is not None
        mark = "<- best" if option is found.best else "next" if option is found.runner_up else ""
        rows.append(
            [
                f"{option.layout.mode} {option.layout.shard} x {option.layout.replicate}",
                duration(option.times.step),
                size(option.memory.total),
                "yes" if option.fits else "no",
                {None: "-", True: "yes", False: "no"}[option.times.hides],
                mark,
            ]
        )
    return [
        *table(["mode, G x R", "step", "memory", "fits", "publish hides", ""], rows),
        *(f"  {reason}" for reason in found.reasons),
    ]


def phase_bytes(placed: Placed) -> list[dict[str, dict[str, int]]]:
    """Buffer bytes by phase and kind in each column, for machines."""
    common = _by_phase(common_transfers(placed))
    return [
        {phase: {**kinds, **of_column[phase]} for phase, kinds in common.items()}
        for of_column in map(_by_phase, column_transfers(placed))
    ]


def _by_phase(found: Sequence[Transfer]) -> dict[str, dict[str, int]]:
    sums: dict[str, dict[str, int]] = {phase.value: {} for phase in Phase}
    for transfer in found:
        kinds = sums[transfer.phase.value]
        kinds[transfer.kind.name.lower()] = kinds.get(transfer.kind.name.lower(), 0) + transfer.nbytes
    return sums
