"""Scripts are followed as bash would run them, without running anything."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from actcalc.errors import SpecError
from actcalc.io.readers.shell.expand import MARK
from actcalc.io.readers.shell.launch import launches
from actcalc.io.readers.shell.script import Script, follow
from tests.conftest import posix

SAME = {
    "loop over words": 'for x in a "b c" $(seq 2); do ALL+=("$x"); done\nshow "${ALL[@]}"',
    "counted loop": "for ((i=0; i<4; i++)); do if (( i < 1 )); then a+=(0); else a+=(1); fi; done\n"
    'printf -v F "[%s]" "$(IFS=,; echo "${a[*]}")"\nshow "$F"',
    "steps": "n=3; ((n++)); (( n *= 2 )); show $n",
    "eval": 'ARGS="--a 1 \\\n  --b \'2 3\'"; CMD="show $ARGS"; eval $CMD',
    "function": 'run() { local n=$1; shift; show $n "${@}" $#; }\n'
    'run 1 "2 3"',
    "arguments": 'run() { show "$@" x; }\nrun "a b" c',
    "trimmed": 'p=/a/b/c.tar.gz; show ${p##*/} ${p%%.*} ${p%.gz} ${p#/} ${p/b/x} ${p//a/y} ${#p}',
    "expr": "show $(expr 3 \\* 4) `basename /x/y.sh .sh` $(dirname /x/y.sh) "
    "$(printf '%d-%s;' 1 a 2 b)",
    "needed": 'x=3; show ${x:?unset} "${y:-$x}"',
    "read": "IFS=',' read -r A B C <<< \"1,2,3,4\"; read -ra X <<< '5 6'; show $A $B $C ${X[@]}",
    "unset": 'x=3; unset x; show "${x:-4}"',
    "joined": 'a=(1 2 3); show "${a[*]}" ${#a[@]} ${a[1]}',
    "test": 'if [[ ! 3 -gt 4 && -n "a" ]]; then show yes; else show no; fi',
}  # fmt: skip


def shown(text: str) -> list[list[str]]:
    return [each.words[1:] for each in follow(text, "x.sh").commands if each.words[0] == "show"]


@posix
@pytest.mark.parametrize("name", SAME)
def test_as_bash_does(name):
    """bash itself, given ``show`` as a function that prints its words, prints the same."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    text = "show() { printf '%s\\n' \"$@\" ---; }\n"
    done = subprocess.run(
        [bash, "-c", text + SAME[name]], capture_output=True, text=True, timeout=20
    )
    words = [line for each in shown(SAME[name]) for line in (*each, "---")]
    assert words == done.stdout.split("\n")[:-1]


def launched(text: str, **found):
    (launch, *_) = launches(follow(text, "x.sh", Script(**found)), text)
    return launch


def test_a_command_for_another_shell_is_followed():
    launch = launched(
        'N=2\nexport CMD=" train.py \\\n --num-layers $N --lr $1"\n'
        'L="python -m torch.distributed.run --nproc_per_node 4"\n'
        'srun --jobid 1 bash -c "$L --node_rank \\$SLURM_PROCID $CMD" 2>&1 | tee log\n'
    )
    assert (launch.program, launch.devices) == ("train.py", 4)
    assert launch.options["num-layers"] == "2"
    assert launch.lacking == {"lr"}


def test_options_in_texts_alone_are_a_file_of_arguments():
    launch = launched('MODEL_ARGS=" \\\n --num-layers 4 --swiglu"\n')
    assert launch.options == {"num-layers": "4", "swiglu": True}
    assert not launch.program


def test_a_script_that_is_read_in():
    """Only what lies beside is looked up, and what is not there is told with its line."""
    beside = {f"{MARK}0{MARK}/models/a.sh": "LAYERS=5"}
    text = (
        'DIR="$(cd -- . && pwd)"\nsource "${DIR}/models/a.sh"\ntorchrun t.py --num-layers $LAYERS'
    )
    assert launched(text, source=beside.get).options["num-layers"] == "5"
    script = follow(text, "x.sh")
    assert script.notes == ['x.sh, line 2: source "${DIR}/models/a.sh" is not read; name it first']


@pytest.mark.parametrize(
    "text",
    [
        "for i in $(seq 4000); do for j in $(seq 4000); do :; done; done",
        "f() { f; f; f; f; }; f",
        'x=aaaaaaaaaa; for i in $(seq 100); do x="$x$x$x"; done',
        "for ((i=0; i<1; i--)); do :; done",
    ],
)
def test_what_never_ends_is_refused(text):
    with pytest.raises(SpecError, match=r"rounds|millions"):
        follow(text, "x.sh")


def test_what_is_left_open_ends(tmp_path):
    """A quote or backtick that is never closed inside a text ends the word, not the reader."""
    script = follow('echo "`pwd"\nX="a`"\nshow "$X"\neval "echo \'"', "x.sh")
    assert any("does not read" in note for note in script.notes)


def test_quotes_around_a_list_of_layers():
    """A YAML of arguments quotes the word that a shell would get."""
    from actcalc.io.megatron.layers import frequency

    assert frequency("'([0]*1+[1]*3)'", 4) == [0, 1, 1, 1]
