"""Requests that come one by one are answered together, each as `generate` answers it alone."""

import asyncio

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from modeling_interdomain import StateStore
from modeling_interdomain.generation.batch import Request
from modeling_interdomain.generation.prompt_store import store_of
from tests.test_generation_batch import alone

LENGTHS = (7, 3, 12, 5, 9)


@pytest.fixture(params=["interdomain", "softmax-interdomain"])
def served(request, make_model):
    return make_model(request.param)


@pytest.fixture
def prompts(random_ids):
    return [random_ids(1, length, seed=length)[0].tolist() for length in LENGTHS]


def limits(**fields) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(**fields)


@pytest.mark.parametrize("fields", [{}, {"max_requests_per_batch": 2}, {"max_batch_tokens": 3}], ids=str)
def test_results_are_those_of_each_alone(served, prompts, fields):
    wanted = {f"req_{number}": alone(served, prompt, max_new_tokens=6) for number, prompt in enumerate(prompts)}
    with served.continuous_batching_context_manager(continuous_batching_config=limits(**fields)) as manager:
        names = manager.add_requests(prompts[:3], max_new_tokens=6)
        first = manager.get_result(names[1])
        names += manager.add_requests(prompts[3:], max_new_tokens=6)
        found = {first.request_id: first}
        while len(found) < len(prompts):
            output = manager.get_result(timeout=30)
            found[output.request_id] = output
    assert {name: output.generated_tokens for name, output in found.items()} == wanted
    assert [found[name].prompt_ids for name in names] == prompts
    assert manager.get_result() is None and not manager.is_running()


def test_a_forward_has_no_more_tokens_than_asked(served, prompts):
    sizes = []
    served.model.embed_tokens.register_forward_pre_hook(lambda module, ids: sizes.append(ids[0].numel()))
    with served.continuous_batching_context_manager(continuous_batching_config=limits(max_batch_tokens=4)) as manager:
        manager.add_requests(prompts, max_new_tokens=3)
        manager.stop()
    assert max(sizes) == 4 and len(list(manager)) == len(prompts)


def test_requests_end_where_they_ask_to(served, prompts):
    """Each with a number of tokens, and end tokens, of its own."""
    text = alone(served, prompts[0], max_new_tokens=8)
    manager = served.init_continuous_batching()
    manager.add_request(prompts[0], "ends", max_new_tokens=8, eos_token_id=text[3])
    manager.add_request(prompts[0], "short", max_new_tokens=2)
    manager.add_request(prompts[0], "streamed", max_new_tokens=5, streaming=True)
    manager.start()
    assert manager.get_result("ends").generated_tokens == text[: text.index(text[3]) + 1]
    assert manager.get_result("short").generated_tokens == text[:2]
    pieces = [output.generated_tokens for output in manager.request_id_iter("streamed")]
    assert pieces == [text[: count + 1] for count in range(5)]
    for _ in range(2):
        manager.stop()
    manager.start()
    assert manager.get_result(manager.add_request(prompts[0], max_new_tokens=1)).generated_tokens == text[:1]
    manager.destroy()


def test_handlers_get_what_came_before_them(served, prompts):
    """As the server asks: the stream first, then where it goes to."""

    async def serve():
        manager, pieces, done = served.init_continuous_batching(), [], asyncio.Event()
        manager.start()

        def note(output):
            pieces.append(output.generated_tokens)
            if output.is_finished():
                done.set()

        manager.register_result_handler("first", lambda output: None)
        with pytest.raises(ValueError, match="Somebody waits for a request 'first' already"):
            manager.register_result_handler("first", note)
        name = manager.add_request(prompts[0], "ours", max_new_tokens=5, streaming=True)
        other = manager.add_request(prompts[1], max_new_tokens=5)
        while len(manager._results_of(name)) < 2:
            await asyncio.sleep(0.01)
        manager.register_result_handler(name, note)
        await asyncio.wait_for(done.wait(), 30)
        assert manager.get_result(other, timeout=30).is_finished()
        manager.stop()
        return pieces

    text = alone(served, prompts[0], max_new_tokens=5)
    assert asyncio.run(serve()) == [text[: count + 1] for count in range(5)]


def test_results_that_a_handler_has_had_are_given_once(served, prompts):
    """Also those that came before it; the name is then free again."""

    async def serve():
        manager, found, done = served.init_continuous_batching(), [], asyncio.Event()
        manager.start()
        name = manager.add_request(prompts[0], "ours", max_new_tokens=2)
        while not manager._results_of(name):
            await asyncio.sleep(0.01)
        manager.register_result_handler(name, lambda output: (found.append(output), done.set()))
        await asyncio.wait_for(done.wait(), 30)
        assert manager.get_result(name, timeout=0) is None and len(found) == 1
        assert manager.add_request(prompts[0], "ours", max_new_tokens=2) == "ours"
        manager.stop()

    asyncio.run(serve())


def test_a_loop_that_is_closed_ends_its_own_request_alone(served, prompts):
    """Whoever asked has gone before the result came."""
    manager = served.init_continuous_batching()

    async def ask():
        manager.register_result_handler("gone", lambda output: None)
        manager.add_request(prompts[0], "gone", max_new_tokens=2)

    asyncio.run(ask())
    name = manager.add_request(prompts[1], max_new_tokens=3)
    manager.start()
    assert manager.get_result(name, timeout=30).generated_tokens == alone(served, prompts[1], max_new_tokens=3)
    assert manager.background_thread_status.fatal_error is None
    manager.stop()


def test_a_request_that_is_cancelled_leaves_the_others(served, prompts):
    with served.continuous_batching_context_manager(continuous_batching_config=limits(max_batch_tokens=2)) as manager:
        names = manager.add_requests(prompts[:3], max_new_tokens=400, streaming=True)
        last = manager.add_request(prompts[3], max_new_tokens=4)
        manager.get_result(names[0])
        for name in [*names, "nobody's"]:
            manager.cancel_request(name)
        assert manager.get_result(last, timeout=30).generated_tokens == alone(served, prompts[3], max_new_tokens=4)
        ends = [output for output in iter(lambda: manager.get_result(timeout=0), None) if output.is_finished()]
    assert sorted(output.request_id for output in ends) == names
    assert all(len(output.generated_tokens) < 400 for output in ends)


def test_a_prompt_that_cannot_be_fails_alone(served, prompts):
    with served.continuous_batching_context_manager() as manager:
        good = manager.add_request(prompts[0], max_new_tokens=3)
        failed = [manager.get_result(manager.add_request(prompt), timeout=30) for prompt in ([], [5, 48], "abc")]
        assert manager.get_result(good, timeout=30).error is None
    assert "The prompt of req_1 has no tokens" in failed[0].error and failed[0].is_finished()
    assert "a token outside of the vocabulary of 48" in failed[1].error
    assert "The prompt of req_3 must be a list of token ids, got str" in failed[2].error


def test_a_request_that_goes_wrong_fails_alone(served, prompts, monkeypatch):
    """Its options are of a wrong kind, or its first or a later token cannot be drawn."""
    choose = Request.choose

    def drawn(request, logits):
        broken = request.name == "first" or (request.name == "later" and len(request.written) == 2)
        choose(request, logits * torch.nan if broken else logits)

    monkeypatch.setattr(Request, "choose", drawn)
    config = GenerationConfig(do_sample=True, top_k=1)
    served.prompt_store = StateStore(block=4)
    with served.continuous_batching_context_manager(generation_config=config) as manager:
        good = manager.add_request(prompts[0], max_new_tokens=6)
        wrong = manager.add_request(prompts[1], max_new_tokens="4")
        for name in ("first", "later"):
            manager.add_request(prompts[2], name, max_new_tokens=6)
        found = {name: manager.get_result(name, timeout=30) for name in (good, wrong, "first", "later")}
    assert found[good].error is None and found[good].generated_tokens == alone(served, prompts[0], max_new_tokens=6)
    assert found[wrong].error.startswith("TypeError: ")
    assert {name: len(found[name].generated_tokens) for name in ("first", "later")} == {"first": 0, "later": 2}
    assert all(found[name].error.startswith("RuntimeError: probability") for name in ("first", "later"))
    monkeypatch.undo()
    text = [*found["later"].prompt_ids, *found["later"].generated_tokens, 5]
    known = served.prompt_store.longest(store_of(served)[1], text)
    assert known is None or known[0] <= len(found["later"].prompt_ids), "nothing is kept of what was broken off"
    how = {"max_new_tokens": 4, "output_logits": True, "return_dict_in_generate": True}
    reused = served.generate(torch.tensor([text]), **how)
    served.prompt_store = None
    expected = served.generate(torch.tensor([text]), **how)
    torch.testing.assert_close(torch.stack(reused.logits), torch.stack(expected.logits))


def test_a_name_is_of_one_request(served, prompts):
    """Until the last of its results is taken; automatic names go round those that are given."""
    manager = served.init_continuous_batching()
    assert manager.add_request(prompts[0], "req_1", max_new_tokens=2) == "req_1"
    names = [manager.add_request(prompts[1], max_new_tokens=2) for _ in range(2)]
    assert names == ["req_0", "req_2"]
    with pytest.raises(ValueError, match="There is a request 'req_1' already: choose another request_id, or leave it"):
        manager.add_request(prompts[2], "req_1")
    manager.start()
    assert manager.get_result("req_0", timeout=30).prompt_ids == prompts[1]
    with manager._changed:
        assert manager._changed.wait_for(lambda: len(manager._results) == 2, timeout=30)
    with pytest.raises(ValueError, match="There is a request 'req_1' already"):
        manager.add_request(prompts[2], "req_1")
    assert manager.get_result("req_1").prompt_ids == prompts[0]
    manager.add_request(prompts[2], "req_1", max_new_tokens=2)
    assert manager.get_result("req_1", timeout=30).prompt_ids == prompts[2]
    manager.stop()


def test_the_end_of_a_manager_is_told_to_all(served, prompts, monkeypatch):
    manager = served.init_continuous_batching(continuous_batching_config=limits(max_batch_tokens=2))
    names = manager.add_requests(prompts, max_new_tokens=1000)
    manager.start()
    manager.stop(hard_stop=True)
    errors = [manager.get_result(name).error for name in names]
    assert errors == ["The manager was stopped before this request was finished."] * len(names)
    with pytest.raises(RuntimeError, match="has stopped; make another"):
        manager.add_request(prompts[0])
    monkeypatch.setattr(served.model, "forward", lambda *args, **kwargs: 1 / 0)
    manager = served.init_continuous_batching()
    names = manager.add_requests(prompts)
    manager.start()
    errors = [manager.get_result(name, timeout=30).error for name in names]
    assert errors == ["Continuous batching has ended: division by zero"] * len(names)
    assert isinstance(manager.background_thread_status.fatal_error, ZeroDivisionError)


def test_the_store_takes_part(served, prompts):
    served.prompt_store = StateStore(block=4)
    with served.continuous_batching_context_manager() as manager:
        text = prompts[0] + manager.get_result(manager.add_request(prompts[0], max_new_tokens=4)).generated_tokens
        manager.get_result(manager.add_request([*text, 5], max_new_tokens=4))
    assert served.prompt_store.tokens_read == len(prompts[0]) + 2


@pytest.mark.parametrize("name", ["max_requests_per_batch", "max_batch_tokens"])
def test_no_rows_are_refused(make_model, name):
    with pytest.raises(ValueError, match="must be positive, got 0"):
        make_model().init_continuous_batching(continuous_batching_config=limits(**{name: 0}))


def test_models_that_write_in_other_ways_are_not_served_together(make_model, monkeypatch):
    """The server then answers in turn, with what the model asks for."""
    model = make_model()
    model.generation_config.num_beams = 2
    assert not hasattr(model, "init_continuous_batching")
    with pytest.raises(NotImplementedError, match="leave out num_beams, or use generate"):
        model.continuous_batching_context_manager()
    model.generation_config.num_beams = 1
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(NotImplementedError, match="call generate_batch.. with the same prompts in all"):
        model.continuous_batching_context_manager()


@pytest.mark.parametrize("given", [[], "a", {}, 1.5, [1.5]], ids=str)
def test_ends_that_are_no_ids_are_refused(served, given):
    with served.continuous_batching_context_manager() as manager:
        with pytest.raises(ValueError, match="eos_token_id must be the id of a token, or a list of such ids, got"):
            manager.add_request([5], "asked", eos_token_id=given)
        name = manager.add_request([5], "asked", max_new_tokens=1, eos_token_id=[3, 4])
        assert manager.get_result(name, timeout=30).error is None
