"""Names of parameters without what wrappers put into them."""

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile and of checkpoint_wrapper


def canonical_name(fqn: str) -> str:
    """A parameter's name as in the model without wrappers, which is what checkpoints use."""
    for wrapper in _WRAPPERS:
        fqn = fqn.replace(wrapper, "")
    return fqn
