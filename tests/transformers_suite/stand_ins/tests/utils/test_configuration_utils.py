# ConfigTester sets each of these fields and reads it back; no value is the field's default.
config_common_kwargs = {
    "output_hidden_states": True,
    "return_dict": False,
    "dtype": "float16",
    "chunk_size_feed_forward": 5,
    "architectures": ["SomeModel"],
    "id2label": {0: "label"},
    "label2id": {"label": 0},
    "problem_type": "regression",
    "bos_token_id": 6,
    "pad_token_id": 7,
    "eos_token_id": 8,
    "tie_word_embeddings": True,
}
