"""First module of every Python process that a test starts.

Collector: imports of torch and Lightning make much and free little. With Python's usual thresholds
the garbage collector takes a fifth of their time.

Profiles: a profile keeps every rank's processor busy for seconds by default. Tests look at its
result, so the default here is the shortest possible profile.

Stacks: SIGUSR1 shows the stacks of all threads and ends the process. The handler belongs to
faulthandler, which needs neither the interpreter lock nor the main thread. It is chained to the
default action, which ends the process once the stacks are complete. Python does not know this
handler, and Lightning resets each signal after `fit` to the handler that Python knows: hence
`signal.signal` puts it back.
"""

import faulthandler
import gc
import importlib.util
import signal
import sys

gc.set_threshold(100_000, 20, 20)
set_handler = signal.signal


class ShortProfileFinder:
    """Import finder that shortens the default profile when its module is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "lightning_dlres.pipeline.profile.config":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_with_short_defaults(module):
            execute(module)
            init = module.ProfileConfig.__init__
            # The last two fields are `repeats` and `seconds`.
            init.__defaults__ = (*init.__defaults__[:-2], 2, 0.0)

        spec.loader.exec_module = execute_with_short_defaults
        return spec


sys.meta_path.insert(0, ShortProfileFinder())


def register_stack_dump():
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=True)


def set_handler_and_keep_stack_dump(number, handler):
    previous = set_handler(number, handler)
    if number == signal.SIGUSR1 and handler == signal.SIG_DFL:
        register_stack_dump()
    return previous


signal.signal = set_handler_and_keep_stack_dump
register_stack_dump()
