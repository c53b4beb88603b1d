"""``actcalc presets list | show``: what is built in, and where every value comes from."""

from __future__ import annotations

from typing import Annotated

import typer

from actcalc.answers.presets import list_presets, show_preset
from actcalc.cli.choices import argument, examples
from actcalc.cli.options import OutputOptions, with_options
from actcalc.cli.output import chosen_format, emit, emit_text
from actcalc.errors import SpecError
from actcalc.io import presets as store
from actcalc.io.devices import find_device, named_devices
from actcalc.render.presets import device_file, list_sheets, show_sheets

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


@app.command("list", epilog=examples("presets list devices", "presets list models --format csv"))
@with_options(OutputOptions)
def list_(
    output: OutputOptions,
    kind: Annotated[
        str | None,
        argument(
            metavar="[KIND]",
            help="models, devices, frameworks or runs.",
            words=lambda: store.KINDS,
        ),
    ] = None,
) -> int:
    """List the presets of one kind, or of all."""
    chosen_format(output)
    if kind is not None and kind not in store.KINDS:
        close = store.suggestion(kind, store.KINDS)
        raise SpecError(f"unknown kind {kind!r}", close or "kinds: " + ", ".join(store.KINDS))
    kinds = [k for k in store.KINDS if kind in (None, k)]
    found = {k: [store.load(k, name) for name in store.names(k)] for k in kinds}
    result = list_presets([preset for group in found.values() for preset in group])
    emit(lambda: list_sheets(found), result.document, output)
    return 0


def _all() -> list[str]:
    """Names of all presets."""
    return [name for kind in store.KINDS for name in store.names(kind)]


@app.command(
    "show", epilog=examples("presets show llama-3-8b", "presets show h100-80gb -o mine.yaml")
)
@with_options(OutputOptions)
def show(
    output: OutputOptions,
    name: Annotated[str, argument(metavar="NAME", help="Name of a preset.", words=_all)],
) -> int:
    """Show one preset: every value with its source; a device as a file that --device reads."""
    kind = next((k for k in store.KINDS if store.exists(k, name)), None)
    if kind is None and named_devices(name):
        kind, name = "devices", find_device(name)
    if kind == "devices" and output.format is None and not output.json and _takes_file(output):
        emit_text(device_file(store.load(kind, name)), output)
        return 0
    chosen_format(output)
    if kind is None:
        hint = store.suggestion(name, _all()) or "`actcalc presets list` lists them"
        raise SpecError(f"unknown preset {name!r}", hint)
    preset = store.load(kind, name)
    emit(lambda: show_sheets(preset), show_preset(preset).document, output)
    return 0


def _takes_file(output: OutputOptions) -> bool:
    return output.output is None or output.output.lower().endswith((".yaml", ".yml"))
