"""``python -m actcalc``."""

from actcalc.cli import main

main()
