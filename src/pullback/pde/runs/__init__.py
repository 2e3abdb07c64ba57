"""Solve a discretized problem step by step.

| file | what it answers |
|---|---|
| `run` | one solve from its first step to its verdict; `Run.advance(share)` |
| `context` | what the phases share, and facts about the run: steps left, level losses |
| `course` | which phase comes next |
| `descent`, `settling`, `point_moves`, `restarts` | the phases |
| `stop_rules` | when a run ends |
| `slabs` | several runs, one after the other in time |
| `settings`, `optimizer`, `refusals` | options, what takes the steps, which networks are refused |
| `run_file`, `signals`, `progress` | checkpoints, interruptions, what the terminal shows |

A strategy of several runs is a class like `SlabMarch`: it builds a `Run` for each attempt, lets it
`advance` by a share of its steps, reads the verdict, and decides which one goes on. A strategy
within one run is a phase: a class with the `RunContext`, asked in `Course.change`.
"""
