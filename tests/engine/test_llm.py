"""The embedded model through the whole offline engine: greedy tokens equal to transformers in float32."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from quickturn.engine.llm import LLM
from quickturn.engine.messages import TokenOutput
from quickturn.files.resolve import embedded_model
from quickturn.sampling_params import SamplingParams

QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea, with an emoji.",
    "Translate 'good morning' into Japanese and into Greek.",
    "Give me a Python function that adds two numbers.",
    "List three animals that can't fly.",
]
COUNT = 40


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    pytest.importorskip("accelerate")
    path: Path = embedded_model()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return model.eval()


def test_greedy_chats_equal_transformers(reference: PreTrainedModel) -> None:
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    sampling = SamplingParams(temperature=0.0, max_tokens=COUNT)
    with LLM("embedded", dtype="float32", device="cpu", memory=256 << 20, max_requests=8) as llm:
        answers = llm.chat(conversations, sampling)
        prompts = [llm.render(one) for one in conversations]
        again = llm.chat(conversations, sampling)
        texts = [llm.tokenizer.decode(answer.tokens) for answer in answers]
    for prompt, answer, second, text in zip(prompts, answers, again, texts, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            expected = reference.generate(
                ids,
                max_new_tokens=COUNT,
                do_sample=False,
                attention_mask=torch.ones_like(ids),
            )
        assert answer.tokens == expected[0, len(prompt) :].tolist()
        assert answer.text == text
        assert second.tokens == answer.tokens
        assert second.cached_tokens == (len(prompt) - 1) // 64 * 64


def test_an_interrupted_call_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("embedded", dtype="float32", device="cpu", memory=256 << 20, max_requests=8) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
        expected = llm.generate("One two", sampling)[0].tokens

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(llm, "_take", interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["Three four", "Five six"], SamplingParams(max_tokens=2000, ignore_eos=True))
        seen: list[TokenOutput] = []
        step = llm._core.step

        def watched() -> object:
            output = step()
            seen.extend(output.outputs)
            return output

        monkeypatch.setattr(llm._core, "step", watched)
        assert llm.generate("One two", sampling)[0].tokens == expected
    assert len([output for output in seen if output.tokens]) <= COUNT + 2
    assert {output.finish for output in seen if output.finish} == {"cancelled", "length"}
