//! QUIC endpoints, identity, joining and authorisation.
