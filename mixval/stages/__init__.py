"""The stages of a run: functions (cell, inputs, store) -> noun."""
