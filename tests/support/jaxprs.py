"""Equations of a traced program and of the programs that it calls."""


def primitives(jaxpr):
    """Names of the equations in order, with a called program's in the place of its call."""
    for equation in jaxpr.eqns:
        called = [value for value in equation.params.values() if hasattr(value, "eqns")]
        if not called:
            yield equation.primitive.name
        for program in called:
            yield from primitives(program)
