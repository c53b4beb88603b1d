"""``actcalc calibrate``: what this machine's GPU reaches of its peaks, as a file of shares."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from actcalc.cli.choices import devices, examples, option
from actcalc.cli.options import OutputOptions, with_options
from actcalc.cli.output import chosen_format, emit, write_whole
from actcalc.errors import SpecError, say

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    epilog=examples(
        "calibrate --save mine.yaml",
        "calibrate --device a100-80gb --gpus 1",
    )
)
@with_options(OutputOptions)
def calibrate(
    output: OutputOptions,
    device: Annotated[
        str | None,
        option(
            "--device",
            help="Whose peaks the shares are of; else as the driver names the GPU.",
            words=devices,
            files=True,
        ),
    ] = None,
    precision: Annotated[
        str | None,
        option(
            "--precision",
            help="Of products and attention: bf16, fp16, fp32.",
            words=lambda: ("bf16", "fp16", "fp32"),
        ),
    ] = None,
    gpus: Annotated[
        int | None, option("--gpus", help="GPUs that collectives run over (all of this machine).")
    ] = None,
    save: Annotated[
        str | None,
        option(
            "--save",
            metavar="FILE",
            help="Write the shares (.yaml), for --efficiency.",
            files=True,
        ),
    ] = None,
) -> int:
    """Measure this GPU's shares of its peaks: products, attention, memory, collectives.

    Takes a few minutes and an idle GPU. The file that --save writes is what --efficiency FILE and
    `efficiency: FILE` in a device's own file read. Needs actcalc[torch].
    """
    chosen_format(output)
    if save is not None and Path(save).suffix not in (".yaml", ".yml"):
        raise SpecError(f"--save {save}: shares are kept as YAML", "end it in .yaml")
    from actcalc.answers.device_shares import PRECISIONS, gpu_name, measure_gpu, shares_file
    from actcalc.io.devices import load_device
    from actcalc.render.calibrate import calibrate_sheets

    number = precision or "bf16"
    if number not in PRECISIONS:
        raise SpecError(f"--precision {number!r} is not measured", "use " + ", ".join(PRECISIONS))
    described = load_device(device) if device is not None else None
    found = gpu_name()
    if described is None:
        try:
            described = load_device(found)
        except SpecError as error:
            raise SpecError(
                f"this GPU is {found}, of which no preset has the peaks",
                "name its --device, or a file with its peaks (`actcalc schema device`)",
            ) from error
    result = measure_gpu(described, number, gpus)
    if save is not None:
        write_whole(Path(save), shares_file(result))
        say(f"wrote {save}: shares for --efficiency {save}")
    emit(lambda: calibrate_sheets(result), result.document, output)
    return 0
