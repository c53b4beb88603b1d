"""docs/api.md is the docstrings of the library: its calls, their flags, results and specs.

``python -m tests.test_api_reference`` writes it anew.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import pytest

import actcalc
from actcalc.answers.breakdown import Breakdown
from actcalc.answers.compare import Comparison
from actcalc.answers.explain.listing import Terms
from actcalc.answers.explain.terms import Explanation
from actcalc.answers.measure.figures import Measurement
from actcalc.answers.memory import MemoryReport
from actcalc.answers.mfu import Utilisation
from actcalc.answers.plan import RunPlan
from actcalc.api.choose import AdviceReport, Search
from actcalc.cli.bundles import help_of
from actcalc.cli.options import RunOptions
from actcalc.cli.search import SearchRunOptions
from actcalc.cli.training import MemoryOptions, PlanTrainingOptions
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "api.md"
CALLS: Mapping[str, tuple[type, ...]] = {
    "compare": (Comparison,), "breakdown": (Breakdown,), "memory": (MemoryReport,),
    "plan": (RunPlan,), "mfu": (Utilisation,), "search": (Search,), "advise": (AdviceReport,),
    "explain": (Explanation, Terms), "measure": (Measurement,), "load_model": (), "load_layer": (),
}  # fmt: skip
"""Every call with the results whose fields the page lists."""
SPECS = ("Model", "Moe", "Mla", "Layout", "Workload")
FLAGS = (RunOptions, MemoryOptions, PlanTrainingOptions, SearchRunOptions)


def plain(text: str) -> str:
    """A docstring's text in Markdown, in one paragraph."""
    text = re.sub(r":(?:func|class|meth|mod):`~?([^`]+)`", r"`\1`", text)
    return " ".join(text.replace("``", "`").split())


def cell(text: str) -> str:
    return plain(text).replace("|", "\\|")


def shape(schema: Mapping[str, Any]) -> str:
    """The type of a field, from its JSON Schema."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(shape(each) for each in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(str(each) for each in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    if schema.get("type") == "array":
        return f"list of {shape(schema.get('items', {}))}"
    if "allOf" in schema:
        return shape(schema["allOf"][0])
    return str(schema.get("type", "any"))


def table(properties: Mapping[str, Any], *, defaults: bool = False) -> Iterator[str]:
    yield "| field | type | " + ("default | " if defaults else "") + "meaning |"
    yield "| :-- | :-- | " + (":-- | " if defaults else "") + ":-- |"
    for name, field in properties.items():
        if name in ("schema", "version"):
            continue
        about = cell(field.get("description", ""))
        value = f"`{field['default']}`" if "default" in field else "required"
        middle = f"{value} | " if defaults else ""
        yield f"| `{name}` | {cell(shape(field))} | {middle}{about} |"


def arguments(text: str) -> Iterator[str]:
    """The lines of ``Args:`` as a list."""
    for name, about in re.findall(r"^    (\w+): (.*(?:\n        .*)*)", text, re.M):
        yield f"- `{name}`: {plain(about)}"


def call_section(name: str) -> Iterator[str]:
    call = getattr(actcalc, name)
    text, _, flags = (inspect.getdoc(call) or "").partition("\nFlags:\n")
    intro, _, args = text.partition("\nArgs:\n")
    own = re.findall(r"^    (\w+): ", args, re.M)
    named = ", ".join(own + ["flags"] * bool(flags)) or "name"
    yield f"### {name}"
    yield ""
    yield f"`{name}({named})`"
    yield ""
    for paragraph in intro.strip().split("\n\n"):
        yield plain(paragraph)
        yield ""
    if args:
        yield from arguments(args)
        yield ""
    results = ", ".join(f"[{kind.__name__}](#{kind.__name__.lower()})" for kind in CALLS[name])
    if results:
        yield f"Returns {results}."
        yield ""


def flag_section() -> Iterator[str]:
    known: dict[str, str] = {}
    for bundle in FLAGS:
        fresh = {n: text for n, text in help_of(bundle).items() if known.get(n) != text}
        known |= fresh
        heads = {
            RunOptions: "Of every call", MemoryOptions: "Of `memory`, `mfu`, `advise` and `search`",
            PlanTrainingOptions: "Of `plan`, which has those of training but `offload`",
            SearchRunOptions: "Of `search`, where a degree is a choice",
        }  # fmt: skip
        yield f"{heads[bundle]}:"
        yield ""
        yield "| keyword | meaning |"
        yield "| :-- | :-- |"
        yield from (f"| `{name}` | {cell(text)} |" for name, text in fresh.items())
        yield ""


def result_section(kind: Any) -> Iterator[str]:
    schema = kind.json_schema()
    yield f"### {kind.__name__}"
    yield ""
    yield plain(inspect.getdoc(kind) or "")
    yield ""
    listed = {name: field for name, field in schema["properties"].items() if name not in kind.lists}
    yield from table(listed)
    yield ""
    for name, part in schema.get("$defs", {}).items():
        if "properties" in part:
            yield f"`{name}`: " + plain(part.get("description", "")).rstrip(".") + "."
            yield ""
            yield from table(part["properties"])
            yield ""


def spec_section(name: str) -> Iterator[str]:
    kind = getattr(actcalc, name)
    yield f"### {name}"
    yield ""
    yield plain((inspect.getdoc(kind) or "").split("\n\n")[0])
    yield ""
    yield from table(kind.model_json_schema()["properties"], defaults=True)
    yield ""


def page() -> str:
    lines = [
        "# The library",
        "",
        "Made of the docstrings by `python -m tests.test_api_reference`. Every command is a",
        "function; keyword arguments have the flags' names. Nothing is loaded before it is used.",
        "",
        "```python",
        "from actcalc import compare, memory",
        "",
        'memory("llama-3-8b", device="h100-80gb").fits',
        'compare("gpt3-175b", tp=8, sp=True)  # shown as its table, in a notebook too',
        "```",
        "",
        "Results are frozen objects. `repr` and a notebook show their tables; `to_dict()` and",
        "`model_dump_json()` are what `--json` prints; `to_pandas()` and `to_polars()` are the",
        "main table of `--format csv` (extras `actcalc[pandas]` and `actcalc[polars]`).",
        "",
        "[The notebook](examples/library.ipynb) shows them at work.",
        "",
        "## Calls",
        "",
    ]
    for name in CALLS:
        lines += call_section(name)
    lines += ["## Flags", "", *flag_section(), "## Results", ""]
    for kinds in CALLS.values():
        for kind in kinds:
            lines += result_section(kind)
    lines += [
        "## Specs",
        "",
        "Frozen; `Model(...)` and `Model.model_validate(mapping)`, `model_validate_json`,",
        "`model_dump`, `model_dump_json`, `model_copy(update=...)`, `model_fields_set` and",
        "`model_json_schema()` do what Pydantic's do, and a spec is a field of a Pydantic model of",
        "your own. `model_validate` raises Pydantic's `ValidationError` for a wrong type, an",
        "unknown field or a number out of bounds, and `SpecError` for values that contradict each",
        "other; the constructor raises `SpecError` for all of them.",
        "",
    ]
    for name in SPECS:
        lines += spec_section(name)
    lines += ["## Errors", ""]
    for name in ("SpecError", "MissingExtraError"):
        text = inspect.getdoc(getattr(actcalc, name)) or ""
        lines += [f"`{name}`: {plain(text)}", ""]
    return "\n".join(lines).rstrip() + "\n"


def test_the_page_is_what_the_docstrings_say():
    """Mend it with ``python -m tests.test_api_reference``."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_public_name_is_on_the_page():
    text = PAGE.read_text(encoding="utf-8")
    for name in actcalc.__all__:
        assert f"### {name}" in text or f"`{name}`" in text or name in ("__version__", "Framework")


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_is_on_the_page(name):
    text = PAGE.read_text(encoding="utf-8")
    own = text[text.index(f"### {name}\n") :].split("\n### ")[0]
    flags = text[text.index("## Flags") : text.index("## Results")]
    for argument in inspect.signature(getattr(actcalc, name)).parameters:
        assert f"- `{argument}`: " in own or f"| `{argument}` |" in flags or len(CALLS[name]) == 0


def test_results_have_the_fields_that_the_page_lists():
    text = PAGE.read_text(encoding="utf-8")
    for kinds in CALLS.values():
        for kind in kinds:
            section = text[text.index(f"\n### {kind.__name__}\n") :].split("\n### ")[1]
            for field in fields(kind):
                assert f"| `{field.name}` |" in section


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
