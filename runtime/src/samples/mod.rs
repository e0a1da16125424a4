//! From chats to packed rows: reading, templates, loss masks, the draft vocabulary.
