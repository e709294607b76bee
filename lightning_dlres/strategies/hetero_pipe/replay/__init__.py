"""Side effects of a training step: undone where it runs, and applied once on every rank.

`user_state`, `buffers`, `metrics`, `logs`, `loggers` and `printing` each handle one
kind of side effect. They share these verbs, and each has those that it needs:

- `snapshot`: read the state before the step.
- `isolate`: let a run of the step work on copies, or record calls instead of making them.
- `diff`: return the changes of a run as plain data that can be sent to other ranks.
- `restore`: put back the state from before the run.
- `apply` (for recorded calls: `replay`): make the changes of the run on a rank, once.

`StepEffects` combines them for one step. `untracked_state` only finds the changes that no module
can undo. The remaining modules are helpers.
"""
