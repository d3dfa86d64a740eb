// What the library shows to the outside. Everything else is hidden: XLA carries the same FFI templates, perhaps of
// another version, and must not share ours.
#pragma once

#define VERAX_EXPORT extern "C" __attribute__((visibility("default")))

// An FFI handler under an exported name.
#define VERAX_HANDLER(name, implementation, ...)                  \
  VERAX_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame* call_frame); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, implementation, __VA_ARGS__)
