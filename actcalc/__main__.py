"""``python -m actcalc``."""

from actcalc.cli import entry

entry()
