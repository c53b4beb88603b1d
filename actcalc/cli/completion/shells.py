"""The scripts that connect a shell's completion with ``actcalc``, and where they are put."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from actcalc.cli.choices import SHELLS
from actcalc.errors import SpecError, suggestion

# A word that ends in = : or / is not finished: no shell puts a space after it.
_BASH = """\
_actcalc_completion() {
  local line word
  COMPREPLY=()
  while IFS= read -r line; do
    word=${line%%$'\\t'*}
    [[ $word == *[=:] ]] && compopt -o nospace
    [[ -e $word ]] && compopt -o filenames
    COMPREPLY+=("$word")
  done < <(_ACTCALC_COMPLETE=bash "$1" "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o nosort -F _actcalc_completion actcalc 2>/dev/null ||
  complete -F _actcalc_completion actcalc
"""

_ZSH = """\
#compdef actcalc
_actcalc() {
  local line word about
  local -a shown open closed
  for line in "${(@f)$(_ACTCALC_COMPLETE=zsh actcalc "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
    [[ -n $line ]] || continue
    word=${line%%$'\\t'*}
    about=${line#$word}
    about=${about#$'\\t'}
    if [[ $word == *[=:/] ]]; then
      open+=("$word")
    elif [[ -n $about ]]; then
      shown+=("${word//:/\\\\:}:$about")
    else
      closed+=("$word")
    fi
  done
  (( $#shown )) && _describe -V actcalc shown
  (( $#closed )) && compadd -a closed
  (( $#open )) && compadd -S '' -a open
  return 0
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  _actcalc "$@"
else
  (( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
  compdef _actcalc actcalc
fi
"""

_FISH = """\
function __actcalc_complete
  set -l words (commandline -opc)
  set -l word (commandline -ct)
  set -lx _ACTCALC_COMPLETE fish
  actcalc $words[2..-1] "$word" 2>/dev/null
end
complete -c actcalc -f -k -a '(__actcalc_complete)'
"""

_POWERSHELL = """\
Register-ArgumentCompleter -Native -CommandName actcalc -ScriptBlock {
  param($wordToComplete, $commandAst, $cursorPosition)
  $words = @($commandAst.CommandElements | Select-Object -Skip 1 |
    Where-Object { $_.Extent.EndOffset -lt $cursorPosition } |
    ForEach-Object { $_.Extent.Text }) + @($wordToComplete)
  $env:_ACTCALC_COMPLETE = 'powershell'
  $env:_ACTCALC_WORDS = $words -join "`n"
  try {
    actcalc | ForEach-Object {
      $word, $about = $_ -split "`t", 2
      if (-not $about) { $about = $word }
      [System.Management.Automation.CompletionResult]::new($word, $word, 'ParameterValue', $about)
    }
  } finally {
    Remove-Item Env:_ACTCALC_COMPLETE, Env:_ACTCALC_WORDS
  }
}
"""

_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH, "powershell": _POWERSHELL}
_ENDINGS = {"bash": "bash", "zsh": "zsh", "powershell": "ps1"}


def script(shell: str) -> str:
    """The script for a shell, "" for the one that runs this; ``SpecError`` for one of no script."""
    return _SCRIPTS[_known(shell)]


def install(shell: str) -> str:
    """Write the script where the shell finds it, and say where; a second time changes nothing.

    fish loads it from its own folder. The others get a line in the file that they read at their
    start. Raises ``SpecError`` for an unknown shell, or a file that cannot be written.
    """
    name = _known(shell)
    try:
        if name == "fish":
            path = _folder("XDG_CONFIG_HOME", ".config") / "fish" / "completions" / "actcalc.fish"
            _write(path, _FISH)
            return f"completion for fish is in {path}; a new shell has it"
        path = _folder("XDG_DATA_HOME", ".local/share") / "actcalc" / f"completion.{_ENDINGS[name]}"
        _write(path, _SCRIPTS[name])
        start = _start_file(name)
        line = f'. "{path}"' if name == "powershell" else f"source '{path}'"
        text = start.read_text(encoding="utf-8") if start.is_file() else ""
        if line not in text.splitlines():
            gap = "\n" if text and not text.endswith("\n") else ""
            _write(start, f"{text}{gap}{line}\n")
    except OSError as error:
        raise SpecError(
            f"completion for {name} cannot be written: {error}",
            f"`actcalc --show-completion {name}` prints it",
        ) from error
    return f"completion for {name} is in {path}, which {start} reads; a new shell has it"


def _known(shell: str) -> str:
    name = (shell or _running()).removesuffix(".exe")
    name = {"pwsh": "powershell"}.get(name, name)
    if not name:
        raise SpecError("which shell this is cannot be told", "name it: " + ", ".join(SHELLS))
    if name not in SHELLS:
        raise SpecError(
            f"no completion for {name!r}", suggestion(name, SHELLS) or "for: " + ", ".join(SHELLS)
        )
    return name


def _running() -> str:
    """The shell that runs this, else the user's own; "" where neither is known."""
    try:
        from shellingham import ShellDetectionFailure, detect_shell
    except ImportError:
        return Path(os.environ.get("SHELL", "")).name
    try:
        return str(detect_shell()[0])
    except (ShellDetectionFailure, OSError):
        return Path(os.environ.get("SHELL", "")).name


def _folder(variable: str, usual: str) -> Path:
    named = os.environ.get(variable)
    return Path(named) if named else Path.home() / usual


def _start_file(shell: str) -> Path:
    if shell == "bash":
        return Path.home() / ".bashrc"
    if shell == "zsh":
        return Path(os.environ.get("ZDOTDIR") or Path.home()) / ".zshrc"
    program = shutil.which("pwsh") or shutil.which("powershell")
    if program is None:
        raise OSError("there is no pwsh or powershell on PATH")
    asked = subprocess.run(
        [program, "-NoProfile", "-Command", "echo $PROFILE"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return Path(asked.stdout.strip())


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")
