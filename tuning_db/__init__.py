"""The tuning database: every measurement, and where it is true.

`tuning_db.store.TuningDatabase` is the only door; `tuning_db.records` holds the values that pass through it. The
package imports without TVM, except `tuning_db.metaschedule`.
"""
