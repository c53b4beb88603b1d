"""Questions that several commands answer, and whether they give one answer.

Every function takes the answers to one random run and yields disagreements. Bytes, FLOPs and
counts are compared to the unit; seconds and ratios, which are floats summed in different orders,
to one part in 10^9.

| question                         | keys that answer it                                           |
|----------------------------------|---------------------------------------------------------------|
| bytes of one layer               | compare policies[].layers[].stored_bytes, stored_bytes_per_   |
|                                  | layer; breakdown layers[].bytes, tensors[].bytes; explain     |
| bytes of the first stage         | compare stored_bytes; memory stages[0].layers_activations_... |
| chunks and micro-batches held    | compare in_flight; memory and plan stages[].in_flight         |
| peak of the fullest stage        | compare device_bytes; memory stages[].total_bytes;            |
|                                  | plan rivals[].peak_bytes; explain peak                        |
| micro-batches of a step          | memory microbatches; mfu prediction; explain overhead; 1f1b   |
| parameters                       | compare, memory                                               |
| FLOPs that run again             | compare recompute_flops; plan rivals[].cost_flops; mfu        |
| FLOPs of forward; of a step      | compare; plan forward_cost; mfu                               |
| seconds of a layer, of a step    | compare; mfu; explain overhead; plan rivals[].cost_seconds    |
| cheapest plan within a budget    | plan; memory says which policies fit, compare what they cost  |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tests.agreement.asking import Args, CrashedError, RefusedError, ask, command
from tests.agreement.runs import RandomRun


class Disagreement(NamedTuple):
    """Two answers to one question."""

    kind: str
    detail: str
    commands: tuple[str, ...]


Found = Iterator[Disagreement]
Document = dict[str, Any]

PIPELINE = ("--pp", "--vpp", "--schedule", "--layers-per-stage")
"""What makes a pipeline: nothing to a layer by itself."""
WHOLE = ("none", "full", "full-sharded", "sqrt", "op")
SPELLINGS = (
    ("selective", "core_attn"), ("ffn", "mlp"), ("norm", "layernorm"), ("full", "uniform:1"),
    ("full", "every:1"), ("attention+mlp", "mlp+attention"),
)  # fmt: skip
"""Names of one policy."""
OF_A_STAGE = ("sqrt", "uniform", "block", "every")
"""Policies that depend on how many layers a stage's chunk has."""


def family(policy: str) -> str:
    """A policy without its number; modules and combinations of them are one family."""
    name, number, _ = policy.partition(":")
    if number:
        return f"{name}:N"
    return name if name in WHOLE else "modules"


def without(args: Args, *flags: str) -> Args:
    """The same words without some flags and their values."""
    kept: Args = []
    words = iter(args)
    for word in words:
        if word in flags:
            next(words)
        else:
            kept.append(word)
    return kept


class Answers:
    """What the commands say of one run; each is asked once."""

    def __init__(self, run: RandomRun) -> None:
        self.run = run
        self._known: dict[tuple[str, ...], Document | Exception] = {}

    def get(self, *args: str) -> Document:
        """The JSON of a command line; raises ``RefusedError`` or ``CrashedError``, each time."""
        if args not in self._known:
            try:
                self._known[args] = ask(*args)
            except (RefusedError, CrashedError) as error:
                self._known[args] = error
        found = self._known[args]
        if isinstance(found, Exception):
            raise found
        return found

    def compared(self, flags: Args, policy: str, beside: Sequence[str]) -> Document:
        """What ``compare`` says of a policy, asked for together with others that it may refuse."""
        with contextlib.suppress(RefusedError, CrashedError):
            found = self.get("compare", *flags, *_policy(*dict.fromkeys((*beside, policy))))
            figures = [each for each in found["policies"] if each["policy"] == policy]
            return {**found, "policies": figures}
        return self.get("compare", *flags, *_policy(policy))

    def compare_line(self, policy: str) -> Args:
        """``compare`` of one policy, on the run's device."""
        return ["compare", *self.run.timed, *_policy(policy)]

    def timed(self, policy: str) -> tuple[Document, Document]:
        """What ``compare`` says on the run's device, and of one policy."""
        found = self.compared(self.run.timed, policy, self.run.policies)
        return found, dict(found["policies"][0])

    def plain(self, policy: str) -> Document:
        """The figures of one policy in ``compare``, without a device."""
        known = dict.fromkeys(name for pair in SPELLINGS for name in pair)
        found = self.compared(self.run.flags, policy, (*self.run.policies, *known))
        return dict(found["policies"][0])

    def memory_line(self, policy: str, *, device: bool = True) -> Args:
        """``memory`` under one policy."""
        flags = self.run.timed if device else self.run.flags
        return ["memory", *flags, *_policy(policy)]

    def need(self, policy: str, *, device: bool = True) -> int:
        """What ``memory`` says that the fullest stage needs."""
        stages = self.get(*self.memory_line(policy, device=device))["stages"]
        return max(stage["total_bytes"] for stage in stages)

    def policies(self) -> list[str]:
        """Those of the run's policies that ``compare`` and ``memory`` both take."""
        taken = []
        for policy in self.run.policies:
            with contextlib.suppress(RefusedError):
                self.timed(policy)
                self.need(policy)
                taken.append(policy)
        return taken


def _policy(*names: str) -> Args:
    return [word for name in names for word in ("--policy", name)]


def _differ(kind: str, what: str, one: Any, other: Any, *lines: Args) -> Found:
    if one != other:
        yield Disagreement(kind, f"{what}: {one} and {other}", tuple(command(*w) for w in lines))


def _near(kind: str, what: str, one: float, other: float, *lines: Args) -> Found:
    if abs(one - other) > 1e-9 * max(abs(one), abs(other)) + 1e-15:
        yield from _differ(kind, what, one, other, *lines)


def _suffix(run: RandomRun, policy: str) -> str:
    """What a kind of disagreement is told apart by: adapters, or else the policy's family."""
    return "LoRA" if any(word.startswith("lora") for word in run.settings) else family(policy)


def refusals(answers: Answers) -> Found:
    """What one command takes the others take."""
    run = answers.run
    for policy in run.policies:
        lines = {"compare": answers.compare_line(policy), "memory": answers.memory_line(policy)}
        if policy == run.policies[-1]:
            lines["plan"] = ["plan", *run.flags, "--memory", "1000TB", *_policy(policy)]
        local = policy.split(":")[0] not in OF_A_STAGE
        if local or not run.has("--schedule"):
            lines["breakdown"] = breakdown_line(run, policy)
        if run.device:
            lines["mfu"] = ["mfu", *run.timed, *_policy(policy)]
            lines["explain overhead"] = ["explain", "overhead", *run.timed, *_policy(policy)]
        refused: dict[str, str] = {}
        for name, line in lines.items():
            try:
                if name == "compare":
                    answers.timed(policy)
                else:
                    answers.get(*line)
            except RefusedError as error:
                refused[name] = str(error)
        taken = [name for name in lines if name not in refused]
        if not taken:
            continue
        for name, reason in refused.items():
            if "no known peak" in reason:
                continue  # bytes have no need of a peak that the device has not published
            yield Disagreement(
                f"refusal: {name} refuses what {taken[0]} takes | {family(policy)}",
                reason,
                (command(*lines[name]), command(*lines[taken[0]])),
            )


def breakdown_line(run: RandomRun, policy: str) -> Args:
    """``breakdown`` of a run: it lists single layers and takes no schedule."""
    flags = without(run.flags, *PIPELINE) if run.has("--schedule") else run.flags
    return ["breakdown", *flags, *_policy(policy)]


def layers(answers: Answers) -> Found:
    """Bytes of one layer: compare and breakdown, and breakdown's leaves."""
    run = answers.run
    for policy in answers.policies():
        if policy.split(":")[0] in OF_A_STAGE and run.has("--schedule"):
            continue
        line, other = breakdown_line(run, policy), answers.compare_line(policy)
        try:
            broken = answers.get(*line)
        except RefusedError:
            continue
        figure, what = answers.timed(policy)[1], _suffix(run, policy)
        ours = [(each["layer"], each["count"], each["bytes"]) for each in broken["layers"]]
        theirs = [(each["kind"], each["count"], each["stored_bytes"]) for each in figure["layers"]]
        names = [name for name, _, _ in ours]
        if len(set(names)) < len(names):
            yield Disagreement(
                "layers: two kinds of layer have one name", str(names), (command(*line),)
            )
        else:
            leaves = dict.fromkeys(names, 0)
            for tensor in broken["tensors"]:
                leaves[tensor["layer"]] += tensor["bytes"]
            sums = [(name, count, leaves[name]) for name, count, _ in ours]
            yield from _differ(f"layers: leaves != breakdown | {what}", "", sums, ours, line)
        yield from _differ(f"layers: breakdown != compare | {what}", "", ours, theirs, line, other)
        yield from _differ(
            f"bytes per layer: breakdown != compare | {what}",
            "stored_bytes_per_layer",
            broken["stored_bytes_per_layer"],
            figure["stored_bytes_per_layer"],
            line,
            other,
        )


def stages(answers: Answers) -> Found:
    """Bytes of the first stage, what it holds, parameters: compare and memory."""
    for policy in answers.policies():
        one, other = answers.compare_line(policy), answers.memory_line(policy)
        compared, figure = answers.timed(policy)
        report = answers.get(*other)
        stage = report["stages"][compared["stage"]]
        what = _suffix(answers.run, policy)
        yield from _differ(
            f"stage: compare != memory | {what}",
            "stored_bytes, layers_activations_bytes",
            figure["stored_bytes"],
            stage["layers_activations_bytes"],
            one,
            other,
        )
        if policy != "none":
            continue
        for name, ours, theirs in (
            ("in flight", compared["in_flight"], stage["in_flight"]),
            ("layers", compared["stage_layers"], stage["layers"]),
            ("parameters", compared["parameters"], report["parameters"]),
        ):
            yield from _differ(f"{name}: compare != memory", "", ours, theirs, one, other)


def peaks(answers: Answers) -> Found:
    """The fullest GPU: compare with a device, memory, explain peak."""
    run = answers.run
    for policy in answers.policies():
        other = answers.memory_line(policy)
        what = _suffix(run, policy)
        if run.device:
            line, figure = answers.compare_line(policy), answers.timed(policy)[1]
            need, fits = answers.need(policy), answers.get(*other)["fits"]
            yield from _differ(
                f"peak: compare != memory | {what}", "", figure["device_bytes"], need, line, other
            )
            yield from _differ(f"fits: compare != memory | {what}", "", figure["fits"], fits, line,
                               other)  # fmt: skip
            if policy == run.policies[-1]:
                yield from _largest(answers, what, figure, policy)
        explained = ["explain", "peak", *run.timed, *_policy(policy)]
        yield from _says(answers, f"peak: explain != memory | {what}", explained,
                         answers.need(policy), other)  # fmt: skip


def _largest(answers: Answers, what: str, figure: Document, policy: str) -> Found:
    """The largest micro-batch that fits: compare with a device, and memory --max."""
    line = [*answers.memory_line(policy), "--max", "micro-batch"]
    (limit,) = answers.get(*line)["limits"]
    yield from _differ(
        f"largest micro-batch: compare != memory | {what}",
        "",
        figure["largest_micro_batch"],
        limit["largest"],
        answers.compare_line(policy),
        line,
    )


def _says(answers: Answers, kind: str, line: Args, figure: int, other: Args) -> Found:
    """Whether an explanation names a number of bytes."""
    try:
        text = "\n".join(answers.get(*line)["lines"])
    except RefusedError as error:
        yield Disagreement(f"{kind} (refused)", str(error), (command(*line),))
        return
    if f"{figure:,} B" not in text:
        yield Disagreement(kind, f"nowhere says {figure:,} B", (command(*line), command(*other)))


EXPLAINED = ("selective", "full", "full-sharded", "attention", "ffn", "norm")


def explanations(answers: Answers) -> Found:
    """What explain prints of layers, checkpoints and micro-batches, beside compare and memory."""
    run = answers.run
    flags = without(run.flags, *PIPELINE, "--zero", "--global-batch")
    terms = {"34": "none", **{name: name for name in run.policies if name in EXPLAINED}}
    for term, policy in terms.items():
        other = ["compare", *flags, *_policy(policy)]
        try:
            figure = answers.compared(flags, policy, tuple(terms.values()))["policies"][0]
        except RefusedError:
            continue
        yield from _says(
            answers,
            f"bytes per layer: explain != compare | {_suffix(run, policy)}",
            ["explain", term, *flags],
            figure["stored_bytes_per_layer"],
            other,
        )
    if run.value("--pp", 1) > 1 and not run.has(*PIPELINE[1:]):
        flags = [*flags, "--pp", str(run.value("--pp", 1))]
    other = ["compare", *flags, "--policy", "none"]
    best = answers.get(*other)["checkpoint_optimum"]["total_bytes"]
    kind = f"c*: explain != compare | {_suffix(run, 'none')}"
    yield from _says(answers, kind, ["explain", "c*", *flags], best, other)
    if run.value("--pp", 1) > 1 and not run.has("--schedule", "--vpp"):
        line = ["explain", "1f1b", *without(run.flags, "--zero")]
        other = answers.memory_line("none")
        count = answers.get(*other)["microbatches"]
        text = "\n".join(answers.get(*line)["lines"])
        if f"m = {count}" not in text:
            yield Disagreement(
                "micro-batches: explain 1f1b != memory",
                f"memory takes {count}; {text.splitlines()[0]}",
                (command(*line), command(*other)),
            )


def times(answers: Answers) -> Found:
    """Seconds and FLOPs on a device: compare, mfu and explain overhead."""
    run = answers.run
    if not run.device:
        return
    flops = (run.value("--micro-batch", 1), run.value("--dp", 1))
    for policy in answers.policies():
        what = _suffix(run, policy)
        line = answers.compare_line(policy)
        compared, figure = answers.timed(policy)
        count = answers.get(*answers.memory_line(policy))["microbatches"]
        try:
            other = ["mfu", *run.timed, *_policy(policy)]
            yield from _mfu(what, compared, figure, answers.get(*other), count, flops, line, other)
        except RefusedError:
            pass
        try:
            other = ["explain", "overhead", *run.timed, *_policy(policy)]
            found = answers.get(*other)["overhead"]
        except RefusedError:
            continue
        (one,) = found["policies"]
        whole = one["backward_seconds"] + one["rerun_seconds"]
        for name, ours, theirs in (
            ("step", figure["step_seconds"], one["step_seconds"]),
            ("slow-down", figure["slowdown_ratio"], one["slowdown_ratio"]),
            ("layer forward", figure["layer_forward_seconds"], one["forward_seconds"]),
            ("layer backward", figure["layer_backward_seconds"], whole),
        ):
            yield from _near(
                f"seconds: compare != explain overhead | {name} {what}", "", ours, theirs, line,
                other,
            )  # fmt: skip
        yield from _differ(
            "micro-batches: memory != explain overhead", "", count, found["microbatches"],
            answers.memory_line(policy), other,
        )  # fmt: skip


def _mfu(
    what: str,
    compared: Document,
    figure: Document,
    used: Document,
    count: int,
    flops: tuple[int, int],
    line: Args,
    other: Args,
) -> Found:
    """One policy's step as compare and mfu have it; ``count`` micro-batches by memory."""
    micro_batch, replicas = flops
    step = count * replicas  # micro-batches of a step on all replicas
    yield from _differ(
        "micro-batches: memory != mfu", "sequences of a step", step * micro_batch,
        used["global_batch"], line, other,
    )  # fmt: skip
    if used["prediction"] is not None:
        yield from _near(f"seconds: compare != mfu | step {what}", "", figure["step_seconds"],
                         used["step_seconds"], line, other)  # fmt: skip
        rate = "tokens_per_second_per_gpu"
        yield from _near(f"tokens per second: compare != mfu | {what}", "", figure[rate],
                         used[rate], line, other)  # fmt: skip
    sequences = used["global_batch"]
    yield from _differ(
        f"FLOPs: compare != mfu | model {what}", "", compared["model_flops"] * sequences,
        used["model_flops"] * micro_batch, line, other,
    )  # fmt: skip
    ratio = figure["hardware_flops_per_model_flops_ratio"]
    yield from _near(f"FLOPs: compare != mfu | hardware {what}", "", ratio,
                     used["hardware_flops"] / used["model_flops"], line, other)  # fmt: skip


NANOSECONDS = 5e-8
"""What a layer's seconds may differ by: a planner rounds each op to whole nanoseconds."""


def planned_times(answers: Answers) -> Found:
    """Seconds that run again, and of one forward: plan on a device, and explain overhead."""
    run = answers.run
    if not run.device or run.value("--pp", 1) > 1:  # explain overhead is of one stage
        return
    line = ["plan", *run.timed]
    try:
        found = answers.get(*line)
    except RefusedError:
        return
    named = {rival["name"]: rival["cost_seconds"] for rival in found["rivals"]}
    for policy in answers.policies():
        other = ["explain", "overhead", *run.timed, *_policy(policy)]
        try:
            (one,) = answers.get(*other)["overhead"]["policies"]
        except RefusedError:
            continue
        kinds = one["layers"]
        again = sum(kind["count"] * kind["rerun_seconds"] for kind in kinds)
        forward = sum(kind["count"] * kind["forward_seconds"] for kind in kinds)
        within = NANOSECONDS * sum(kind["count"] for kind in kinds)
        for name, ours, theirs in (
            ("re-run", named.get(policy), again),
            ("forward", found["forward_cost"] if policy == "none" else None, forward),
        ):
            if ours is not None and abs(ours - theirs) > within:
                yield from _differ(
                    f"seconds: plan != explain overhead | {name} {_suffix(run, policy)}",
                    "",
                    ours,
                    theirs,
                    line,
                    other,
                )


def plans(answers: Answers) -> Found:
    """A plan's named policies beside memory and compare, and its optimum beside them."""
    run = answers.run
    every = ["plan", *run.flags, "--memory", "1000TB"]
    try:
        found = answers.get(*every)
    except RefusedError:
        return
    yield from _held(answers, found, every)
    named = {rival["name"]: rival for rival in found["rivals"]}
    for policy in answers.policies():
        other = answers.memory_line(policy, device=False)
        line = ["compare", *run.flags, *_policy(policy)]
        need = answers.need(policy, device=False)
        cost = answers.plain(policy)["recompute_flops"]
        what = _suffix(run, policy)
        rival = named.get(policy)
        if rival is not None:
            yield from _differ(f"peak: plan != memory | {what}", "", rival["peak_bytes"], need,
                               every, other)  # fmt: skip
            yield from _differ(f"FLOPs: plan != compare | {what}", "", rival["cost_flops"], cost,
                               every, line)  # fmt: skip
        if policy in ("none", run.policies[-1]):
            yield from _within(answers, policy, need, cost, line, other)


def _held(answers: Answers, found: Document, every: Args) -> Found:
    """Micro-batches in flight on every stage, and the FLOPs of one forward."""
    other = answers.memory_line("none")
    ours = [sum(stage["in_flight"]) for stage in found["stages"]]
    theirs = [stage["in_flight"] for stage in answers.get(*other)["stages"]]
    yield from _differ("in flight: plan != memory", "", ours, theirs, every, other)
    line = ["compare", *answers.run.flags, "--policy", "full"]
    figure = answers.plain("full")
    if figure["recompute_forward_ratio"]:
        forward = figure["recompute_flops"] / figure["recompute_forward_ratio"]
        yield from _near("FLOPs: plan != compare | forward of all layers", "",
                         found["forward_cost"], forward, every, line)  # fmt: skip


def _within(answers: Answers, policy: str, need: int, cost: int, line: Args, other: Args) -> Found:
    """A budget that memory says a policy fits in: a plan fits, and costs no more."""
    tight = ["plan", *answers.run.flags, "--memory", f"{need}B"]
    found = answers.get(*tight)
    what = _suffix(answers.run, policy)
    if not found["feasible"]:
        yield Disagreement(
            f"plan: none fits where memory says one does | {what}",
            f"memory needs {need}, plan {found['smallest_memory_bytes']}",
            (command(*tight), command(*other)),
        )
    elif found["cost_flops"] > cost:
        yield Disagreement(
            f"plan: costs more than a policy that fits | {what}",
            f"{found['cost_flops']} and {cost}",
            (command(*tight), command(*other), command(*line)),
        )
    if not found["feasible"]:
        return
    for rival in found["rivals"]:
        peak, price = rival["peak_bytes"], rival["cost_flops"]
        if peak is not None and peak <= need and price < found["cost_flops"]:
            yield Disagreement(
                "plan: beaten in its own table",
                f"{rival['name']} costs {price}, the plan {found['cost_flops']}",
                (command(*tight),),
            )


def spellings(answers: Answers) -> Found:
    """One policy under two names; segments keep the inputs that full keeps."""
    for one, other in SPELLINGS:
        line = ["compare", *answers.run.flags, *_policy(one, other)]
        kind = f"two names: {one} and {other}"
        try:
            ours, theirs = answers.plain(one), answers.plain(other)
        except RefusedError as error:
            yield Disagreement(f"{kind} (refused)", str(error), (command(*line),))
            continue
        for each in (ours, theirs):
            each.pop("policy")
        yield from _differ(kind, "", ours, theirs, line)
    number = next((p for p in answers.run.policies if p.startswith(("uniform", "block"))), None)
    if number is not None:
        yield from _megatrons(answers, number)
    line = ["compare", *answers.run.flags, *_policy("full", "sqrt")]
    full, segments = (
        [(each["kind"], each["stored_bytes"]) for each in answers.plain(name)["layers"]]
        for name in ("full", "sqrt")
    )
    yield from _differ("input of a layer: sqrt != full", "", full, segments, line)


def _megatrons(answers: Answers, policy: str) -> Found:
    """``uniform:N`` and ``block:N`` as Megatron's options."""
    method, _, number = policy.partition(":")
    flags = ["--recompute-method", method, "--recompute-num-layers", number]
    line, other = ["compare", *answers.run.flags, *flags], answers.compare_line(policy)
    try:
        ours = answers.plain(policy)
    except RefusedError:
        return
    yield from _differ("two names: N layers, and Megatron's options", "", ours,
                       answers.get(*line)["policies"][0], line, other)  # fmt: skip


QUESTIONS: tuple[Callable[[Answers], Found], ...] = (
    refusals, layers, stages, peaks, explanations, times, planned_times, plans, spellings,
)  # fmt: skip


def disagreements(run: RandomRun) -> list[Disagreement] | None:
    """Every disagreement about a run; None where ``memory`` refuses it under any policy."""
    answers = Answers(run)
    plain = answers.memory_line("none", device=False)
    try:
        answers.get(*plain)
    except RefusedError:
        return None
    found: list[Disagreement] = []
    for question in QUESTIONS:
        try:
            found += question(answers)
        except RefusedError as error:
            found.append(
                Disagreement(f"refusal in {question.__name__}", str(error), (command(*plain),))
            )
        except CrashedError as error:
            found.append(Disagreement("crash", str(error), (command(*error.args[1]),)))
    return found
