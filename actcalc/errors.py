"""The one exception a user can cause: what was wrong, with the values, and what to do."""

from __future__ import annotations

import errno
import sys
from collections.abc import Mapping, Sequence

LONGEST_LINE = 900
"""Characters of an error or a hint that are shown; what is longer is cut."""


def visible(text: str) -> str:
    """``text`` on one line, with what a terminal would act on written out.

    Control characters, line ends, marks of direction and lone halves of surrogate pairs become
    ``\\n``, ``\\x1b`` or ``\\u202e``: no name can move the cursor, or look like a line of ours.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii")
        for each in text
    )


def _line(text: str) -> str:
    """One line of an error, visible and of bounded length."""
    shown = visible(text[: 2 * LONGEST_LINE])
    return shown if len(shown) <= LONGEST_LINE else shown[: LONGEST_LINE - 3] + "..."


def say(text: str) -> None:
    """Write a line to stderr, where there is one: a note that cannot be shown changes no answer."""
    try:
        sys.stderr.write(visible(text) + "\n")
    except (AttributeError, OSError, ValueError):
        return


class SpecError(Exception):
    """A description that cannot be computed, or a file that cannot be read as one.

    ``str(error)`` is one line naming the values; ``error.hint`` says what to do. It is not a
    ``ValueError``, so that Pydantic passes it through validators unchanged.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(_line(message))
        self.hint = _line(hint)
        if hint:
            self.add_note(f"hint: {self.hint}")  # which a traceback shows


_FILE_HINTS: Mapping[int, str] = {
    errno.ENOENT: "check the path: the folder has to exist",
    errno.ENOTDIR: "check the path: a part of it is a file, not a folder",
    errno.EISDIR: "name a file, not a folder",
    errno.EACCES: "check who may read and write it, and its folder",
    errno.EPERM: "check who may read and write it, and its folder",
    errno.EROFS: "choose a place that can be written",
    errno.ENOSPC: "free some space, or choose another place",
    errno.EDQUOT: "free some space, or choose another place",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ELOOP: "the path leads in a circle of symbolic links: name another",
    errno.EBADF: "open the stream, or write to a file with -o",
}
"""What to do about each reason for which a file cannot be read or written."""


def file_error(doing: str, error: OSError | ValueError) -> SpecError:
    """``cannot ``doing``: why``, with a hint that says what happened."""
    number = error.errno if isinstance(error, OSError) else None
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return SpecError(f"cannot {doing}: {why}", _FILE_HINTS.get(number or 0, "check the path"))


def shorten(text: object, limit: int = 60) -> str:
    """``text`` quoted, and cut to ``limit`` characters, for an error line."""
    quoted = repr(text)
    return quoted if len(quoted) <= limit else quoted[: limit - 3] + "..."


def suggestion(word: str, known: Sequence[str], *, shortest: int = 2, likeness: float = 0.6) -> str:
    """A hint with the known words that begin like ``word``, else the closest one; "" if none is.

    A beginning of fewer than ``shortest`` letters tells nothing; ``likeness`` is difflib's ratio.
    """
    import difflib

    if len(word) > 100:
        return ""
    begun = [name for name in known if len(word) >= shortest and name.startswith(word.lower())][:4]
    close = begun or difflib.get_close_matches(word.lower(), known, n=1, cutoff=likeness)
    if not close:
        return ""
    *most, last = close
    return f"did you mean {', '.join(most)} or {last}?" if most else f"did you mean {last}?"


class MissingExtraError(SpecError):
    """A command needs an optional dependency that is not installed."""


def install(extra: str) -> str:
    """The command that adds an extra to this installation, as it was made.

    From a folder or a repository it is named again, since an index need not have this version; by
    pipx, uv or pip, whichever made the environment.
    """
    import json
    import sys
    from importlib import metadata, util
    from urllib.parse import unquote, urlparse

    try:
        text = metadata.distribution("actcalc").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    origin = json.loads(text or "{}")
    url, editable = str(origin.get("url", "")), origin.get("dir_info", {}).get("editable", False)
    package = f"actcalc[{extra}]"
    if url.startswith("file:"):
        package = f"{unquote(urlparse(url).path)}[{extra}]"
    elif url:
        version_control = origin.get("vcs_info", {}).get("vcs")
        package += f" @ {version_control}+{url}" if version_control else f" @ {url}"
    prefix = sys.prefix.replace("\\", "/")
    if "/pipx/" in prefix:
        return f"pipx install --force {'--editable ' if editable else ''}'{package}'"
    if "/uv/tools/" in prefix:
        return f"uv tool install --force {'--editable ' if editable else ''}'{package}'"
    program = "pip" if util.find_spec("pip") is not None else "uv pip"
    return f"{program} install {'-e ' if editable else ''}'{package}'"
