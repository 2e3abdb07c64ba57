"""Solve a discretized problem step by step: strategy, phases of a run, stops, restarts, slabs."""
