"""Rows of data: files of them, what the model is shown of each, and the order of prompts in
training.
"""

from trainer.data.files import load_rows
from trainer.data.prompts import (
    Prompt,
    PromptDataset,
    check_preferences,
    check_token_ids,
    columns_read,
    epoch_order,
    load_held_out,
    load_prompts,
    load_tokenizer,
    plain_prompts,
    prompt_rows,
    require_embedded,
    take,
    unembedded,
)
from trainer.data.row_images import (
    encoded_images,
    image_rules,
    messages_and_images,
    row_images,
    stored_images,
)
from trainer.data.rows import Remarks, RenderedRow, RowReader, column_value, in_chunks, row_reader

__all__ = [
    "Prompt",
    "PromptDataset",
    "Remarks",
    "RenderedRow",
    "RowReader",
    "check_preferences",
    "check_token_ids",
    "column_value",
    "columns_read",
    "encoded_images",
    "epoch_order",
    "image_rules",
    "in_chunks",
    "load_held_out",
    "load_prompts",
    "load_rows",
    "load_tokenizer",
    "messages_and_images",
    "plain_prompts",
    "prompt_rows",
    "require_embedded",
    "row_images",
    "row_reader",
    "stored_images",
    "take",
    "unembedded",
]
