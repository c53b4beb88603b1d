"""The front door: help and completion, as they are declared."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from actcalc.cli import choices
from actcalc.cli.app import COMMANDS, build
from actcalc.cli.completion import lines, shells
from actcalc.errors import SpecError
from tests.conftest import posix

NESTED = {"presets": ("list", "show")}
PAGES = [
    (name, *inner)
    for name in COMMANDS
    if name != "help"
    for inner in [(), *((each,) for each in NESTED.get(name, ()))]
]
PYTHON_TYPES = re.compile(r"<\w+>|list\[|\bstr\b|\bint\b|\bfloat\b|\bINTEGER\b|\bTEXT\b")


@pytest.mark.parametrize("columns", [40, 80, 120])
@pytest.mark.parametrize("page", PAGES, ids=" ".join)
def test_help_is_grouped_and_speaks_to_people(cli, page, columns):
    outcome = cli(*page, "--help", columns=columns)
    assert outcome.code == 0
    assert outcome.out == cli("help", *page, columns=columns).out
    assert outcome.out == cli(*page, "-h", columns=columns).out
    assert not PYTHON_TYPES.search(outcome.out)
    assert outcome.out.isascii()
    shown = [line for line in outcome.out.splitlines() if not line.startswith("  actcalc ")]
    assert max(map(len, shown)) <= columns
    assert all(line == line.rstrip() for line in shown)


@pytest.mark.parametrize("page", [page for page in PAGES if page != ("presets",)], ids=" ".join)
def test_help_has_two_examples_that_parse(cli, page):
    text = cli(*page, "--help").out
    examples = re.findall(r"^  actcalc (.+)$", text.partition("Examples:")[2], re.MULTILINE)
    assert len(examples) >= 2
    group = build()
    for example in examples:
        words = shlex.split(example)
        assert tuple(words[: len(page)]) == page
        command, rest = group.get_command(None, words[0]), words[1:]
        if len(page) == 2:
            command, rest = command.commands[words[1]], rest[1:]
        command.make_context(words[0], list(rest))  # raises for an unknown option


def test_help_groups_shared_options_in_one_order(cli):
    text = cli("mfu", "--help").out
    titles = re.findall(r"^([A-Z][a-z ]+):$", text, re.MULTILINE)
    assert titles[:2] == ["Examples", "Arguments"]
    shared = [title for title in titles if title in choices.PANELS]
    assert shared == [panel for panel in choices.PANELS if panel in shared]
    assert {"Model and workload", "Layout", "Kernels", "Training", "Device", "Output"} <= {*shared}
    assert titles.index("Step") < titles.index("Layout")


def test_help_says_defaults_and_values(cli):
    text = " ".join(cli("memory", "--help", columns=100).out.split())
    for piece in ("[2048]", "bf16, fp16, fp32, amp-bf16, amp-fp16, fp8. [bf16]", "[GB]", "[adamw]"):
        assert piece in text
    assert "megatron, megatron-local, paper" in text
    assert "run, config, torchtune" in text


def test_help_of_no_command_says_what_is_meant(cli):
    outcome = cli("help", "compar")
    assert outcome.code == 2
    assert outcome.err == (
        "error: help compar: there is no such command\nhint: did you mean compare?\n"
    )


def offered(line: str) -> list[str]:
    """What completion offers at the end of a line."""
    return [word for word, _ in lines.after(line.split(" "))]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mem", ["memory"]),
        ("gpt3", ["gpt3-175b"]),
        ("help pl", ["plan"]),
        ("memory gpt3", ["gpt3-175b"]),
        ("gpt2 --pol", ["--policy"]),
        ("gpt2 --policy sel", ["selective"]),
        ("gpt2 --policy none,full-", ["none,full-sharded"]),
        ("gpt2 --policy mlp+moe_", ["mlp+moe_act"]),
        ("gpt2 --policy=sel", ["--policy=selective"]),
        ("gpt2 --policy = sel", ["selective"]),
        ("gpt2 --device h100-8", ["h100-80gb"]),
        ("compare gpt2 --framework megatron,torcht", ["megatron,torchtitan",
                                                     "megatron,torchtitan-0.2.2"]),
        ("memory gpt2 --max ", ["micro-batch", "seq"]),
        ("gpt2 --format mark", ["markdown"]),
        ("gpt2 --set hidden_d", ["hidden_dropout="]),
        ("presets s", ["show"]),
        ("presets show h100-80", ["h100-80gb"]),
        ("explain c", ["c*", "cp"]),
        ("schema plan-l", ["plan-layer"]),
        ("--show-completion z", ["zsh"]),
        ("explain 34 gpt2-x", ["gpt2-xl"]),
        ("nonsense of a line --nothing ", None),
        ("presets nothing ", []),
        ("gpt2 --seq ", []),
    ],
)  # fmt: skip
def test_completion_offers(line, words):
    found = offered(line)
    assert words is None or found == words


def test_completion_offers_files_and_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt-mine.yaml").touch()
    (tmp_path / "gpt-runs").mkdir()
    assert {"gpt-mine.yaml", "gpt-runs/", "gpt-22b"} <= set(offered("gpt-"))
    assert offered("gpt2 -o gpt-m") == ["gpt-mine.yaml"]
    assert offered(f"memory {tmp_path}/gpt-r") == [f"{tmp_path}/gpt-runs/"]


def test_completion_leaves_out_what_was_given():
    given = offered("gpt2 --tp 8 --policy none --")
    assert "--tp" not in given
    assert {"--policy", "--seq"} <= set(given)


def test_completion_of_names_imports_no_answer():
    code = (
        "import sys, os; os.environ['_ACTCALC_COMPLETE'] = 'bash'; sys.argv = ['actcalc', 'gpt3'];"
        "import atexit; heavy = ('actcalc.answers', 'actcalc.layers', 'numpy', 'pydantic', 'rich');"
        "atexit.register(lambda: print([m for m in heavy if m in sys.modules], file=sys.stderr));"
        "from actcalc.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "gpt3-175b\n"
    assert done.stderr == "[]\n"


def test_words_may_come_in_a_variable(monkeypatch, capsys):
    from actcalc.cli.completion import answer

    monkeypatch.setenv("_ACTCALC_WORDS", "presets\nli")
    answer(["ignored"])
    assert capsys.readouterr().out.startswith("list\tList the presets")


@pytest.mark.parametrize("shell", choices.SHELLS)
def test_scripts_are_printed(cli, shell):
    outcome = cli("--show-completion", shell)
    assert outcome.code == 0
    assert "_ACTCALC_COMPLETE" in outcome.out


def test_a_shell_without_a_script_is_an_error(cli):
    outcome = cli("--show-completion", "bahs")
    assert (outcome.code, outcome.err) == (
        2, "error: no completion for 'bahs'\nhint: did you mean bash?\n",
    )  # fmt: skip


@pytest.mark.parametrize(("shell", "start"), [("bash", ".bashrc"), ("zsh", ".zshrc")])
def test_install_writes_once(tmp_path, monkeypatch, shell, start):
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("XDG_DATA_HOME", "ZDOTDIR"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / start).write_text("alias a=b")
    for _ in range(2):
        assert start in shells.install(shell)
    path = tmp_path / ".local/share/actcalc" / f"completion.{shell}"
    assert path.read_text() == shells.script(shell)
    assert (tmp_path / start).read_text() == f"alias a=b\nsource '{path}'\n"


def test_install_for_fish_goes_where_fish_looks(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    shells.install("fish")
    assert (tmp_path / "fish/completions/actcalc.fish").read_text() == shells.script("fish")


def test_install_without_powershell_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SpecError, match="no pwsh"):
        shells.install("powershell")


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(tmp_path):
    script = tmp_path / "fish/completions/actcalc.fish"
    script.parent.mkdir(parents=True)
    script.write_text(shells.script("fish"))
    out = _shell(tmp_path, "fish", "-c", "complete -C 'actcalc presets '")
    assert out.splitlines()[0].split("\t")[0] == "list"


@posix
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes(tmp_path):
    (tmp_path / "c.bash").write_text(shells.script("bash"))
    line = (
        f". {tmp_path}/c.bash; COMP_WORDS=(actcalc gpt2 --policy sel); COMP_CWORD=3; "
        "_actcalc_completion actcalc; echo ${COMPREPLY[*]}"
    )
    assert _shell(tmp_path, "bash", "--norc", "-c", line) == "selective\n"


@posix
@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_reads_its_script(tmp_path):
    (tmp_path / "c.zsh").write_text(shells.script("zsh"))
    line = (
        f"autoload -Uz compinit; compinit -u -D; source {tmp_path}/c.zsh; echo ${{_comps[actcalc]}}"
    )
    assert _shell(tmp_path, "zsh", "-f", "-c", line) == "_actcalc\n"


def _shell(folder, *command: str) -> str:
    """The output of a shell that finds this package as ``actcalc``."""
    program = folder / "actcalc"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m actcalc "$@"\n')
    program.chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "XDG_CONFIG_HOME": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout


def test_every_flag_of_a_run_alone_is_explained(cli):
    from actcalc.answers.explain.terms import explains
    from actcalc.cli.app import LazyGroup

    params = LazyGroup(name="actcalc").get_command(None, "memory").params
    flags = [each.opts[0] for each in params if each.opts[0].startswith("--")]
    known = [flag for flag in flags if explains(flag)]
    assert {"--zero", "--qlora", "--sp", "--attention"} <= set(known)
    for flag in ("--zero", "--qlora", "--deepspeed", "--fsdp"):
        done = cli("explain", flag)
        assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (("gpt2", "-tp", "8"), "did you mean --tp?"),
        (("memory", "gpt2", "--tokens-per-second", "3"), "mfu takes --tokens-per-second"),
        (("compare", "gpt2", "--optimizer", "sgd"), "use --set optimizer=VALUE here; memory, plan"),
        (("compare", "gpt2", "--qlora"), "hint: memory, plan"),
        (("explain", "--tp", "8"), "`actcalc explain 34 --tp 8`"),
    ],
)
def test_an_option_of_another_command_names_who_takes_it(cli, args, hint):
    done = cli(*args)
    assert done.code == 2
    assert hint in done.err
