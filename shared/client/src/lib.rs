//! The SDK with which an application registers a query, streams inputs and receives results.
