// The switch between stacks for cuda/stack.h, by the System V calling convention.
#ifdef __x86_64__
asm(R"(
    .text
    .hidden emulator_switch_stack
    .globl emulator_switch_stack
    .type emulator_switch_stack, @function
emulator_switch_stack:
    push %rbx
    push %rbp
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbp
    pop %rbx
    ret
    .size emulator_switch_stack, . - emulator_switch_stack
    .section .note.GNU-stack, "", @progbits
    .text
)");
#endif
