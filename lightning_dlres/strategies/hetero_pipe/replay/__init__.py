"""Side effects of a training step: undone where it runs, and applied once on every rank.

Each module handles one kind of side effect, with the same verbs:

- `snapshot`: read the state before the step.
- `isolate`: let a run of the step work on copies, or record calls instead of making them.
- `diff`: return what a run changed, as plain data that can be sent to other ranks.
- `restore`: put the state of before the run back.
- `apply` (for recorded calls: `replay`): make the changes of the run on a rank, once.

`StepEffects` combines them for one step.
"""
