"""Rows in time: intervals that follow how earlier ones have fared, and a watch on the rows."""

from .alarm import Alarm as Alarm
from .monitor import Monitor as Monitor
from .online import Online as Online
from .scale import DeltaScale as DeltaScale
