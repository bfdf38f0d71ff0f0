"""What an explanation says for each status and each kind of cut: tables of sentences.

Kept apart from the logic so that a wording is changed in one place. `{...}` are filled in by
`_explain.py`: op, location, source, name, root.
"""

from __future__ import annotations

from typing import Final

from gradtrace._records import CutKind, Status

VERDICTS: Final = {
    Status.REACHED: "a gradient arrived.",
    Status.ZERO: "gradients arrived, and all of them were zero everywhere.",
    Status.NONFINITE: "a NaN or an infinity arrived.",
    Status.CUT: "no gradient arrived; every way to where backward started is cut.",
    Status.UNUSED: "no gradient arrived; nothing made from it flows into where backward started.",
    Status.FROZEN: "its requires_grad is False, so no gradient was to be expected.",
    Status.NO_BACKWARD: "no backward pass was started while recording.",
    Status.UNKNOWN: "whether a gradient should have reached it cannot be told.",
}

HAPPENED: Final = {
    CutKind.DETACH: "`detach()` returns the values without their history: to autograd a constant.",
    CutKind.DETACH_: "`detach_()` took the tensor itself out of its history, for every later use.",
    CutKind.DATA: "`.data` reads and writes values behind autograd's back.",
    CutKind.NO_GRAD: "This ran while grad mode was off, so that autograd kept no history.",
    CutKind.INFERENCE_MODE: (
        "This ran in `torch.inference_mode()`, whose results can never carry history."
    ),
    CutKind.COPY: "This made a new tensor from values or memory; the history stayed behind.",
    CutKind.ESCAPE: "The value left torch here, as a plain Python or NumPy value.",
    CutKind.NON_DIFFERENTIABLE: "`{op}` has no derivative; its result cannot carry a gradient.",
    CutKind.NO_GRADIENT: "The backward of `{op}` gives no gradient for this input.",
    CutKind.NOT_REQUESTED: "Backward was asked for other tensors only, and did not go there.",
    CutKind.NOT_REQUIRED: "When `{op}` took it, its requires_grad was False.",
    CutKind.FIRST_ORDER: (
        "A gradient that was taken with create_graph=False is a constant to later losses."
    ),
}

REMEDIES: Final = {
    CutKind.DETACH: (
        "If it should learn along this way, use the tensor itself in place of its detached twin."
    ),
    CutKind.DETACH_: (
        "Use `x = x.detach()` where only one later use is meant, or move `detach_()` behind the"
        " last use that should learn."
    ),
    CutKind.DATA: (
        "Use the tensor itself; to change values on purpose, write into it under `torch.no_grad()`."
    ),
    CutKind.NO_GRAD: (
        "Move this call out of the no_grad block; look also for a decorator, and for evaluation"
        " code that is used in training."
    ),
    CutKind.INFERENCE_MODE: (
        "Compute it outside inference_mode. A clone of an inference tensor makes the error go away"
        " and stays cut all the same."
    ),
    CutKind.COPY: (
        "Use `torch.stack([...])` or `torch.cat` instead of `torch.tensor([...])`, and the tensor"
        " itself instead of a new Parameter, Variable or copy made from it."
    ),
    CutKind.ESCAPE: (
        "Keep the value a tensor: pass the 0-dimensional tensor where a float was passed, and"
        " write the arithmetic in torch."
    ),
    CutKind.NON_DIFFERENTIABLE: (
        "Use a differentiable stand-in: softmax with a temperature or a straight-through estimator"
        " for argmax, a sigmoid for a comparison. (Rounding gives zeros, argmax gives nothing.)"
        " `requires_grad_()` on the result or on the loss silences the error and trains nothing."
    ),
    CutKind.NO_GRADIENT: (
        "If it is a custom Function: let its backward return a gradient in this position, and hand"
        " the tensor to `apply` as an argument of its own. What comes by closure or inside a tuple,"
        " list or dict is invisible to autograd."
    ),
    CutKind.NOT_REQUESTED: (
        "Leave out `inputs=`, or name this tensor among them, if it should get a gradient too."
    ),
    CutKind.NOT_REQUIRED: (
        "Call `requires_grad_()` before the first use, not after it: autograd's history is written"
        " while an op runs. Where it was switched off for this use on purpose (a frozen network in"
        " another one's step), gradients still pass to what came before."
    ),
    CutKind.FIRST_ORDER: (
        "Pass `create_graph=True` to the backward or grad call whose gradients are used in a later"
        " loss."
    ),
}

OFTEN_MEANT: Final = frozenset(
    {
        CutKind.DETACH,
        CutKind.DETACH_,
        CutKind.DATA,
        CutKind.NO_GRAD,
        CutKind.INFERENCE_MODE,
        CutKind.NOT_REQUESTED,
        CutKind.NOT_REQUIRED,
        CutKind.FIRST_ORDER,
    }
)
ASSERT_CUT: Final = (
    "If it is meant, keep it from disappearing with a test: trace.assert_cut({name!r},"
    ' by="{kind}").'
)
ASSERT_STOP: Final = (
    "If it is meant, keep it from disappearing with a test: trace.assert_only_cuts([{source!r}])."
)

INDICES: Final = (
    "The indices that `{op}` gives are integers and have no derivative; the values beside them do."
)
HAPPENED_IN_CHECKPOINT: Final = "Re-entrant checkpointing runs its blocks without grad mode."
CHECKPOINT: Final = (
    "Where none of its inputs requires grad, nothing inside learns. Pass use_reentrant=False, or"
    " have an input require grad (model.enable_input_require_grads() in transformers)."
)
LEFT_CHECKPOINT: Final = (
    "Only what the block returns gets a history. This value left it in another way, such as a hook,"
    " a list or an attribute (an auxiliary loss, recorded hidden states). Return it from the block,"
    " or pass use_reentrant=False."
)

UNUSED_NOTHING: Final = (
    "No op in the recording took it. Either what uses it did not run (an optional input, an expert,"
    " a branch that was not taken), or the forward pass uses another tensor: a model that was"
    " rebuilt, copied or moved after this one was kept has other parameters."
)
UNUSED_ELSEWHERE: Final = (
    "It was used, but no result of it flows into {roots}. A branch whose output is dropped, or an"
    " output that the loss does not use, is the usual reason."
)
FROZEN: Final = "If it should learn, call requires_grad_() on it before the forward pass."
NO_BACKWARD: Final = (
    "Call backward() inside the `with gradtrace.record()` block: what comes after it is not seen."
)
ZERO: Final = (
    "A factor that is zero, a saturated clamp or ReLU, or an op whose derivative is zero (sign,"
    " round, floor) passes zeros on. A parameter that is multiplied with one that starts at zero"
    " learns after the first step."
)
NONFINITE: Final = (
    "Look for a square root or a division at 0, a logarithm of 0, and for `torch.where` around"
    " them: the branch that is not chosen gets a zero gradient, and zero times infinity is NaN."
    " Mask the input, not the output."
)
ASK_FOR_EDGES: Final = (
    'Record with gradtrace.record(values="edges") to be told the op in whose backward it arose.'
)
SEE_UNSEEN: Final = "The way runs through {unseen}, which was not observed."
MAY_BE_IN_UNSEEN: Final = (
    "It may have flowed into {unseen}, whose graph was built before the recording or out of its"
    " sight: of that only what is linked is known. Record the forward pass too, in one thread."
)
STRAY_PASS: Final = (
    "A backward pass was started outside torch's Python API; its roots and edges were not observed."
)
FILLED_UNSEEN: Final = (
    "Its .grad was filled while recording, but not by a pass that was observed: code that sets"
    " .grad itself (FSDP does) hides what arrived."
)
HOLDS_OTHERS: Final = (
    "No op took it, but its class holds other tensors, which can be used in its place (FSDP does):"
    " look for leaves of its whole shape."
)
NOT_OBSERVED: Final = "A call could not be observed ({trouble}); the way may run through it."
OVERWRITTEN: Final = "Its gradient is not to be trusted: {}."
BROKE_OFF: Final = "Backward pass {index} raised {error} before it came to this tensor."
NOT_A_LEAF: Final = (
    "Not a leaf: {op} made it{at}{of}. Its .grad stays None unless retain_grad() was called on it"
    " before backward."
)
CREATE_IT_THERE: Final = (
    " An optimizer should hold the leaf: create it with its final device and dtype, or call"
    " .requires_grad_() after the conversion."
)
