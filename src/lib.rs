//! memfit makes training fit in memory.
