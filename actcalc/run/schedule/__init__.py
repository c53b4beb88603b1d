"""Pipeline schedules: the order of work on every stage, and what it keeps alive.

A schedule is data: per stage, an ordered list of actions. Everything else is read off that list
by running it: how many chunk activations a stage holds (:func:`in_flight`), of which chunks
(:func:`in_flight_by_chunk`), at which moments (:func:`moments`; all of them in order,
:func:`sequence`), and the time of one step with its bubble
(:func:`actcalc.cost.pipeline.makespan`).
"""

from actcalc.run.schedule.held import (
    Held,
    Moment,
    Worked,
    in_flight,
    in_flight_by_chunk,
    moments,
    sequence,
)
from actcalc.run.schedule.orders import Action, actions

__all__ = [
    "Action",
    "Held",
    "Moment",
    "Worked",
    "actions",
    "in_flight",
    "in_flight_by_chunk",
    "moments",
    "sequence",
]
