//! Bincode bodies through tonic's codec interface.

use std::marker::PhantomData;

use bytes::{Buf, BufMut};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

use crate::wire;

/// Encodes `E`, decodes `D`.
pub struct BincodeCodec<E, D>(PhantomData<(E, D)>);

impl<E, D> Default for BincodeCodec<E, D> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<E, D> Codec for BincodeCodec<E, D>
where
    E: Serialize + Send + 'static,
    D: DeserializeOwned + Send + 'static,
{
    type Encode = E;
    type Decode = D;
    type Encoder = BincodeEncoder<E>;
    type Decoder = BincodeDecoder<D>;

    fn encoder(&mut self) -> Self::Encoder {
        BincodeEncoder(PhantomData)
    }

    fn decoder(&mut self) -> Self::Decoder {
        BincodeDecoder(PhantomData)
    }
}

/// The encoding half.
pub struct BincodeEncoder<E>(PhantomData<E>);

impl<E: Serialize> Encoder for BincodeEncoder<E> {
    type Item = E;
    type Error = Status;

    fn encode(&mut self, item: E, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        let bytes = wire::encode(&item).map_err(|error| Status::internal(error.to_string()))?;
        buffer.put_slice(&bytes);
        Ok(())
    }
}

/// The decoding half.
pub struct BincodeDecoder<D>(PhantomData<D>);

impl<D: DeserializeOwned> Decoder for BincodeDecoder<D> {
    type Item = D;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<D>, Status> {
        let bytes = buffer.copy_to_bytes(buffer.remaining());
        wire::decode(&bytes)
            .map(Some)
            .map_err(|error| Status::data_loss(error.to_string()))
    }
}
