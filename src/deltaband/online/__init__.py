"""Rows in time: intervals that adapt to the misses of earlier ones, and a watch on the rows."""

from .alarm import Alarm as Alarm
from .monitor import Monitor as Monitor
from .online import Online as Online
from .scale import DeltaScale as DeltaScale
