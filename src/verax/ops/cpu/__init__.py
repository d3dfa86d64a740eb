"""Fast implementations for CPUs: C++ kernels in one shared library, called through XLA's foreign function interface.

    build.py      compiles native/ with the machine's compiler, when the package is installed or by hand
    library.py    loads the library and registers its handlers with JAX; levels and their capabilities
    linear.py     the implementations of `ops.linear`; one file for each group of operations (attention.py, conv.py)
    native/       C++17, no dependency but XLA's FFI headers
      kernels/    arithmetic: compiled once for each instruction-set level, so without the standard library's templates
      *_ffi.cc    handlers: check buffers, share the work over XLA's thread pool, call the level's kernel

To add a kernel `foo`:

1. `native/kernels/foo.h`: a struct of plain pointers and sizes, and `VERAX_DECLARE_KERNEL(foo, const FooTask&, ...)`.
   `native/kernels/foo.cc`: the loop nest in a comment, then the function, inside `namespace verax::VERAX_LEVEL`, in
   terms of `vec.h`. Everything else in an unnamed namespace: the same template compiled at two levels must not become
   one symbol. Include nothing that may emit shared inline functions.
2. `native/foo_ffi.cc`: check shapes and dtypes, `parallel_for` over `VERAX_KERNEL(foo)`, and
   `VERAX_HANDLER(verax_foo, ...)`. The build finds both files by itself.
3. `foo.py`: `@ops.foo.implementation("native", **library.REQUIREMENTS, accepts=...)` whose function returns
   `differentiated_as(ops.foo.reference, kernel, *arrays)`, where `kernel` returns
   `library.call("verax_foo", shape, *arrays, **attributes)`. Add the handler's name to `library.HANDLERS` and import
   the file in `verax/ops/__init__.py`.
4. `tests/ops/test_foo.py`, or `tests/ops/cpu/test_foo.py` for what only the kernel promises: every level against the
   reference, over the shapes that break kernels. `tests/native/foo_test.cc`: the same without JAX, as a program that
   `make test-native` runs under the address and undefined-behaviour sanitisers.

`python -m verax.ops.cpu.build` compiles after a change. An instruction-set level is one row of `native/levels.h`.
"""
