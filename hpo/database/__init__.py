"""The database below the storage: engines, transactions, reading, single guarded writes, outages."""
