"""Choice of blocks: the submodules of a captured module that become its layers."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

# Modules that hold parameters and have no forward.
_NEVER_CALLED = (nn.ParameterList, nn.ParameterDict)


def candidate_blocks(root: nn.Module, closed: Collection[str] = ()) -> dict[str, nn.Module]:
    """Return the modules that may become layers, by name, in the order of `named_modules`.

    The root is opened, and so is every module with a list or sequence of several modules with
    parameters somewhere inside, unless it is itself a member of such a list. Lists and sequences
    are opened if they are members.

    Args:
        root: The captured module.
        closed: Names of modules that are not opened.
    """
    blocks: dict[str, nn.Module] = {}
    for name, child in root.named_children():
        _collect(name, child, closed, blocks, is_member=_is_list(root))
    return blocks


def _collect(
    name: str,
    module: nn.Module,
    closed: Collection[str],
    blocks: dict[str, nn.Module],
    *,
    is_member: bool,
) -> None:
    if not any(True for _ in module.parameters()) or isinstance(module, _NEVER_CALLED):
        return
    has_list = any(_is_list(inner) for inner in module.modules())
    is_opened = _is_list(module) or (has_list and not is_member)
    if name in closed or not is_opened:
        blocks[name] = module
        return
    for child_name, child in module.named_children():
        _collect(f"{name}.{child_name}", child, closed, blocks, is_member=_is_list(module))


def _is_list(module: nn.Module) -> bool:
    """Return True for a list, dict or sequence of several modules with parameters."""
    is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict)) or (
        isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    )
    with_parameters = (m for m in module.children() if any(True for _ in m.parameters()))
    return is_container and sum(1 for _ in with_parameters) > 1
