"""Solve a discretized problem step by step: the phases of a run, stops, restarts, slabs of time."""
